// Elements. Text from a log always becomes a text node, never markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  append(element, children);
  return element;
}

function append(element, children) {
  for (const child of children) {
    if (child === undefined || child === null || child === false) continue;
    if (Array.isArray(child)) append(element, child);
    else element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

/** An element of HTML. */
export function el(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** An element of SVG. */
export function svg(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** Replaces the children of an element. */
export function replace(element, ...children) {
  element.replaceChildren();
  append(element, children);
}

/** Draws a canvas in the resolution of the screen; `draw(context, width, height)` in CSS pixels. */
export function paint(canvas, draw) {
  const box = canvas.getBoundingClientRect();
  const ratio = window.devicePixelRatio || 1;
  const [width, height] = [Math.max(1, Math.floor(box.width)), Math.max(1, Math.floor(box.height))];
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  draw(context, width, height);
}

/** The colours of the theme, by name. */
export function colours() {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue("--" + name).trim();
  const names = ["text", "muted", "line", "bg", "panel", "blue", "orange", "green", "red", "purple", "accent", "soft"];
  const found = { font: style.getPropertyValue("--mono"), size: parseFloat(style.fontSize) || 15 };
  for (const name of names) found[name] = of(name);
  return found;
}
