// The bytes of a packet and its fields.

import { el, replace } from "./dom.js";
import { bytesText, opcodeMeaning, syndromeMeaning } from "./words.js";
import { KIND } from "./run.js";
import { app, currentRun } from "./state.js";
import { dissect } from "./dissect.js";
import { packetLabel } from "./say.js";

export class PacketView {
  constructor() {
    this.element = el("div", { class: "packet", tabindex: "0", role: "group", "aria-label": "Packet" });
    this.stamp = "";
  }

  draw() {
    const run = currentRun();
    const event = app.state.sel;
    // A narrow screen has room for eight bytes in a line.
    const perLine = innerWidth < 640 ? 8 : 16;
    const stamp = `${app.state.run}/${event}/${run.version}/${perLine}`;
    if (stamp === this.stamp) return;
    this.stamp = stamp;
    if (event < 0 || event >= run.length) return replace(this.element, el("p", { class: "empty" }, "Select a packet: click one in the ladder, or press n for the next."));
    const frame = run.frame(event);
    if (frame) return replace(this.element, this.dissected(run, event, frame, perLine));
    replace(this.element, this.fields(run, event));
  }

  dissected(run, event, frame, perLine) {
    const headers = dissect(frame);
    const cells = [];
    const dump = el("div", { class: "dump", role: "img", "aria-label": "Bytes of the packet" });
    const owner = [];
    headers.forEach((header, number) => { for (let at = header.from; at < header.to; at++) owner[at] = number; });
    const fields = new Map();
    const light = (from, to, on) => { for (let at = from; at < to; at++) cells[at]?.classList.toggle("lit", on); };
    for (let at = 0; at < frame.bytes.length; at += perLine) {
      const line = el("div", { class: "dump-line" }, el("span", { class: "dump-offset" }, at.toString(16).padStart(4, "0")));
      for (let byte = at; byte < at + perLine; byte++) {
        if (byte >= frame.bytes.length) break;
        const first = owner[byte] !== owner[byte - 1];
        const cell = el("span", { class: `byte h${(owner[byte] ?? 0) % 6}${first ? " first" : ""}`, title: headers[owner[byte]]?.name ?? "" },
          frame.bytes[byte].toString(16).padStart(2, "0"));
        cells[byte] = cell;
        line.append(cell);
      }
      const text = Array.from(frame.bytes.subarray(at, at + perLine), (byte) => (byte >= 32 && byte < 127 ? String.fromCharCode(byte) : "·")).join("");
      line.append(el("span", { class: "dump-text" }, text));
      dump.append(line);
    }
    const tree = headers.map((header, number) => el("section", { class: `header h${number % 6}` },
      el("h3", { onmouseenter: () => light(header.from, header.to, true), onmouseleave: () => light(header.from, header.to, false) },
        header.name, el("span", { class: "muted" }, ` bytes ${header.from}–${header.to - 1} · ${header.meaning}`)),
      header.fields.length > 0 && el("table", {}, el("tbody", {}, header.fields.map((field) => {
        const row = el("tr", {
          tabindex: "0", onmouseenter: () => light(field.from, field.to, true), onmouseleave: () => light(field.from, field.to, false),
          onfocus: () => light(field.from, field.to, true), onblur: () => light(field.from, field.to, false),
        }, el("th", {}, field.name), el("td", { class: "mono" }, field.value), el("td", { class: "muted" }, field.meaning));
        fields.set(field.name, row);
        return row;
      })))));
    cells.forEach((cell, byte) => cell.addEventListener("mouseenter", () => {
      const header = headers[owner[byte]];
      const field = header?.fields.find((field) => byte >= field.from && byte < field.to);
      for (const row of this.element.querySelectorAll("tr.lit")) row.classList.remove("lit");
      if (field) fields.get(field.name)?.classList.add("lit");
    }));
    return [
      el("h2", {}, packetLabel(run, event), el("span", { class: "muted" }, ` ${bytesText(frame.length)} on the wire, ICRC ${frame.intact ? "right" : "WRONG"}`)),
      el("div", { class: "packet-split" }, dump, el("div", { class: "fields" }, tree)),
    ];
  }

  /** The fields of a packet in a log without bytes. */
  fields(run, event) {
    const kind = run.kind.values[event];
    const opcode = run.opcodes.words[run.opcode.values[event]];
    if (!opcode) return [el("h2", {}, "This event is not a packet"), el("p", { class: "empty" }, "Press n for the next packet.")];
    const packet = run.entry(event).data.packet ?? {};
    const syndrome = run.syndromes.words[run.syndrome.values[event]];
    const rows = Object.entries(packet).map(([name, value]) => el("tr", {}, el("th", {}, name), el("td", { class: "mono" }, String(value)),
      el("td", { class: "muted" }, name === "opcode" ? opcodeMeaning(opcode) : name === "syndrome" ? syndromeMeaning(syndrome) : "")));
    return [
      el("h2", {}, packetLabel(run, event)),
      el("p", { class: "empty" }, "This log has no bytes. To see them, create the report from a folder with a capture of the same run: softhca report FOLDER."),
      el("table", { class: "fields" }, el("tbody", {}, rows)),
      kind === KIND.SENT && el("p", { class: "muted" }, opcodeMeaning(opcode)),
    ];
  }
}
