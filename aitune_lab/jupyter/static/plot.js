// @ts-check
/** A Plotly figure that keeps zoom and legend when it changes, in the colours of the page's theme. */

/** @typedef {import("./types").Model} Model */
/** @typedef {{data: object[], layout: Record<string, any>}} Figure */

const ASK_AGAIN_MS = 20_000;
const HEIGHT = 380;
const LIBRARY = Symbol.for("aitune_lab.plotly");

/** The library, or where to wait for it: one for all plots of a page. */
function shared() {
  const page = /** @type {any} */ (globalThis);
  if (!page[LIBRARY]) {
    /** @type {(library: any) => void} */
    let came = () => undefined;
    const waited = new Promise((resolve) => {
      came = resolve;
    });
    page[LIBRARY] = { waited, came, askedAt: -Infinity, loaded: false };
  }
  return page[LIBRARY];
}

/** Ask this plot's kernel for the library, unless another plot has just done so. @param {Model} model */
function library(model) {
  const holder = shared();
  const now = performance.now();
  if (!holder.loaded && now - holder.askedAt > ASK_AGAIN_MS) {
    holder.askedAt = now;
    model.send({ op: "plotly" });
  }
  return holder.waited;
}

/** Take the library's source, which defines a module in one of the ways of old. @param {DataView} source */
function loaded(source) {
  const holder = shared();
  if (holder.loaded) return;
  holder.loaded = true;
  const made = /** @type {{exports: any}} */ ({ exports: {} });
  new Function("module", "exports", "define", new TextDecoder().decode(source))(made, made.exports, undefined);
  holder.came(made.exports);
}

/**
 * A figure's JSON with some colours exchanged, wherever they stand.
 * @param {any} value
 * @param {Map<string, string>} colours
 * @returns {any}
 */
function recoloured(value, colours) {
  if (typeof value === "string") {
    // A colour stands alone, or in the markup of a row's name.
    return colours.get(value) ?? value.replace(/(?<=<span style='color:)#[0-9a-f]{6}/g, (own) => colours.get(own) ?? own);
  }
  if (Array.isArray(value)) return value.map((part) => recoloured(part, colours));
  if (!value || Object.getPrototypeOf(value) !== Object.prototype) return value;
  return Object.fromEntries(Object.entries(value).map(([key, part]) => [key, recoloured(part, colours)]));
}

/**
 * The figure in the page's colours: in place of the neutral ones, and where it sets none.
 * @param {Figure} figure
 * @param {Record<string, string>} neutral
 * @param {HTMLElement} at
 */
function themed(figure, neutral, at) {
  const style = getComputedStyle(at);
  const colour = (/** @type {string} */ name, /** @type {string} */ otherwise) =>
    style.getPropertyValue(name).trim() || otherwise;
  const text = colour("--jp-ui-font-color1", "#333");
  const muted = colour("--jp-ui-font-color2", "#666");
  const line = muted; // whiskers and reference lines must stand out; borders of the page need not
  const grid = colour("--jp-border-color2", "#ddd");
  const ground = colour("--jp-layout-color1", "#fff");
  const page = { ink: text, muted, line, grid };
  const colours = new Map(Object.entries(page).map(([name, value]) => [neutral[name], value]));
  const { data, layout } = recoloured(structuredClone(figure), colours);
  const font = { color: text, family: colour("--jp-ui-font-family", "system-ui, sans-serif"), size: 12 };
  const axis = { gridcolor: grid, zerolinecolor: line, linecolor: line, tickfont: { color: muted }, automargin: true };
  const axes = Object.keys(layout).filter((name) => /^[xy]axis\d*$/.test(name));
  /** @type {Record<string, any>} */
  const drawn = {
    uirevision: "kept",
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    autosize: true,
    height: HEIGHT,
    ...layout,
    margin: { t: layout.title?.text ? 56 : 24, r: 16, b: 40, l: 48, ...layout.margin },
    font: { ...font, ...layout.font },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: muted, activecolor: text, ...layout.modebar },
    hoverlabel: { ...layout.hoverlabel, bgcolor: ground, bordercolor: line, font: { color: text, ...layout.hoverlabel?.font } },
  };
  if (layout.title?.subtitle?.text) drawn.title = oneTitle(layout.title, muted);
  for (const name of new Set([...axes, "xaxis", "yaxis"])) {
    drawn[name] = { ...axis, ...layout[name], tickfont: { ...axis.tickfont, ...layout[name]?.tickfont } };
  }
  return { data, layout: drawn };
}

/**
 * Title and subtitle as one text: Plotly puts a subtitle over its title when a figure is drawn a second time.
 * @param {any} title
 * @param {string} muted
 */
function oneTitle({ subtitle, ...title }, muted) {
  const { size = 12, color = muted } = subtitle.font ?? {};
  // The baseline of the first of several lines, not their top, is put at the title's place.
  const capital = title.yanchor === "top" ? Math.round(0.75 * (title.font?.size ?? 17)) : 0;
  const pad = { ...title.pad, t: (title.pad?.t ?? 0) + capital };
  return { ...title, pad, text: `${title.text}<br><span style="font-size:${size}px;color:${color}">${subtitle.text}</span>` };
}

/** @param {Figure} figure */
function label(figure) {
  const title = figure.layout?.title?.text ?? figure.layout?.title ?? "";
  return String(title).replace(/<[^>]*>/g, " ") || "chart";
}

export default {
  /** @param {{model: Model}} context */
  initialize({ model }) {
    model.on("msg:custom", (/** @type {{op: string}} */ message, /** @type {DataView[]} */ buffers) => {
      if (message.op === "plotly") loaded(buffers[0]);
    });
  },
  /** @param {{model: Model, el: HTMLElement}} context */
  render({ model, el }) {
    // Plotly's own button for sharing would send the figure to a server.
    const offline = { showSendToCloud: false, plotlyServerURL: "" };
    const config = { ...offline, displaylogo: false, showTips: false, modeBarButtonsToRemove: ["lasso2d", "select2d"] };
    const place = document.createElement("div");
    place.className = "ait-plot";
    place.setAttribute("role", "img");
    el.append(place);
    /** @type {any} */
    let plotly = null;
    let width = 0;
    let removed = false;

    async function draw() {
      if (!plotly || removed) return;
      const figure = /** @type {Figure} */ (model.get("figure"));
      place.setAttribute("aria-label", label(figure));
      const { data, layout } = themed(figure, model.get("neutral"), el);
      await plotly.react(place, data, layout, config);
      el.dataset.drawn = String(Number(el.dataset.drawn ?? 0) + 1);
    }

    const resized = new ResizeObserver(() => {
      if (!plotly || removed || !place.clientWidth || place.clientWidth === width) return;
      width = place.clientWidth;
      plotly.Plots.resize(place);
    });
    const theme = new MutationObserver(() => void draw());
    library(model).then((/** @type {any} */ came) => {
      plotly = came;
      void draw();
      resized.observe(place);
    });
    model.on("change:figure", draw);
    theme.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light", "data-jp-theme-name"] });
    return () => {
      removed = true;
      model.off("change:figure", draw);
      theme.disconnect();
      resized.disconnect();
      plotly?.purge(place);
    };
  },
};
