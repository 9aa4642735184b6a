// @ts-check
/** Making elements. Text goes in as text, never as markup. */

/**
 * @param {string} tag
 * @param {Record<string, string | number | boolean | null | undefined>} [attributes] null, undefined and false are left out
 * @param {(Node | string)[]} children
 * @returns {HTMLElement}
 */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) made.setAttribute(name, String(value));
  }
  made.append(...children);
  return made;
}

const PATHS = {
  chevron: "M6 4l4 4-4 4",
  down: "M4.5 6.5L8 10l3.5-3.5",
  pin: "M6 2.5h4M6.7 2.5v4L4.5 9h7L9.3 6.5v-4M8 9v4.5",
  search: "M7 3a4 4 0 1 0 0 8 4 4 0 0 0 0-8zM10 10l3.5 3.5",
  check: "M3.5 8.5l3 3 6-7",
  about: "M3 6.5c2-2 3.5-1.5 5 0s3 2 5 0M3 10.5c2-2 3.5-1.5 5 0s3 2 5 0",
  cross: "M4.5 4.5l7 7M11.5 4.5l-7 7",
};

/** A small drawing in the colour of the text; it says nothing to screen readers. @param {keyof typeof PATHS} name */
export function icon(name) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  const path = document.createElementNS(space, "path");
  for (const [key, value] of Object.entries({ viewBox: "0 0 16 16", class: `ait-icon ait-icon-${name}`, "aria-hidden": "true" })) {
    svg.setAttribute(key, value);
  }
  path.setAttribute("d", PATHS[name]);
  svg.append(path);
  return svg;
}
