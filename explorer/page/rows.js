// A list that creates only its visible rows, with a map of all rows beside it.
//
// It scrolls without the scroll bar of the browser, which ends at about 30 million pixels.

import { colours, el, paint } from "./dom.js";

export class Rows {
  /** `source()` gives `{ length, draw(first, last, height), mark(row) }`. */
  constructor(source, drawn) {
    this.source = source;
    this.top = 0;
    this.rowHeight = 26;
    this.content = drawn;
    this.sticks = false;
    this.lastLimit = 0;
    this.map = el("canvas", { class: "map", title: "All rows, with faults and failures marked; click to go there" });
    this.element = el("div", { class: "rows", tabindex: "0", role: "group", "aria-label": "Rows" }, el("div", { class: "rows-body" }, drawn), this.map);
    this.element.addEventListener("wheel", (event) => {
      event.preventDefault();
      const unit = event.deltaMode === 1 ? 1 : event.deltaMode === 2 ? this.visible() : 1 / this.rowHeight;
      this.scrollTo(this.top + event.deltaY * unit);
    }, { passive: false });
    const jump = (event) => {
      const box = this.map.getBoundingClientRect();
      this.scrollTo(((event.clientY - box.top) / box.height) * this.source().length - this.visible() / 2);
    };
    this.map.addEventListener("pointerdown", (event) => {
      this.map.setPointerCapture(event.pointerId);
      jump(event);
    });
    this.map.addEventListener("pointermove", (event) => event.buttons && jump(event));
    this.marks = { stamp: "", bins: [] };
    this.touch();
  }

  touch() {
    let last = null;
    this.content.addEventListener("pointerdown", (event) => { if (event.pointerType === "touch") last = event.clientY; });
    this.content.addEventListener("pointermove", (event) => {
      if (last === null || event.pointerType !== "touch") return;
      this.scrollTo(this.top - (event.clientY - last) / this.rowHeight);
      last = event.clientY;
    });
    for (const end of ["pointerup", "pointercancel"]) this.content.addEventListener(end, () => { last = null; });
  }

  visible() {
    return Math.max(1, this.content.clientHeight / this.rowHeight);
  }

  limit() {
    return Math.max(0, this.source().length - Math.floor(this.visible()) + 1);
  }

  scrollTo(row) {
    this.top = Math.min(Math.max(0, row), this.limit());
    this.draw();
  }

  /** Scrolls until a row is visible. */
  reveal(row) {
    const visible = this.visible();
    if (row < this.top + 1) this.top = Math.max(0, row - Math.min(3, visible / 4));
    else if (row > this.top + visible - 3) this.top = row - visible + Math.min(5, visible / 3);
    this.top = Math.min(Math.max(0, this.top), this.limit());
  }

  draw() {
    const source = this.source();
    this.rowHeight = Math.round(1.75 * parseFloat(getComputedStyle(document.documentElement).fontSize));
    // At the end of a live run, the list follows it.
    const limit = this.limit();
    this.top = this.sticks && this.top >= this.lastLimit ? limit : Math.min(this.top, limit);
    this.lastLimit = limit;
    const first = Math.floor(this.top);
    const last = Math.min(source.length, Math.ceil(this.top + this.visible()));
    source.draw(first, last, this.rowHeight, (first - this.top) * this.rowHeight);
    this.drawMap(source);
  }

  drawMap(source) {
    paint(this.map, (context, width, height) => {
      const colour = colours();
      const stamp = source.stamp + "/" + height;
      if (this.marks.stamp !== stamp) {
        const bins = new Uint8Array(height);
        const rows = Math.max(this.visible(), source.length);
        const step = Math.max(1, Math.floor(source.length / 400000));
        for (let row = 0; row < source.length; row += step) {
          const bin = Math.min(height - 1, Math.floor((row / rows) * height));
          const mark = source.mark(row);
          if (mark > bins[bin]) bins[bin] = mark;
        }
        this.marks = { stamp, bins };
      }
      for (let y = 0; y < height; y++) {
        const mark = this.marks.bins[y];
        if (mark === 0) continue;
        context.fillStyle = mark === 2 ? colour.red : colour.orange;
        // The width repeats the meaning of the colour.
        context.fillRect(mark === 2 ? 2 : width / 2, y, mark === 2 ? width - 4 : width / 2 - 2, 2);
      }
      const length = Math.max(this.visible(), source.length);
      const [from, size] = [(this.top / length) * height, Math.max(14, (this.visible() / length) * height)];
      context.globalAlpha = 0.22;
      context.fillStyle = colour.text;
      context.fillRect(0, Math.min(from, height - size), width, Math.min(size, height));
      context.globalAlpha = 1;
    });
  }
}
