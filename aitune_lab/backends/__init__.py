"""How a module can run: one file per backend behind one base class and registry."""
