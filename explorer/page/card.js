// The card itself: WebAssembly in a worker, so that the page goes on while a scenario runs, and can end it.

import { inflated } from "./data.js";

/** What the worker does. It stands alone: of the page it knows what it is told. */
function cardInWorker() {
  const OUTPUT = { RESULT: 0, EVENTS: 1, FRAMES: 2 };
  let compiled = null, instance = null;

  async function run(module, text, seed) {
    compiled ??= await WebAssembly.compile(module);
    instance ??= await WebAssembly.instantiate(compiled, {});
    const card = instance.exports;
    const bytes = new TextEncoder().encode(text);
    const at = card.input(bytes.length);
    new Uint8Array(card.memory.buffer, at, bytes.length).set(bytes);
    const output = (kind) => new Uint8Array(card.memory.buffer, card.output(kind), card.output_length(kind)).slice();
    const result = () => new TextDecoder().decode(output(OUTPUT.RESULT));
    try {
      card.run(BigInt.asUintN(64, BigInt(seed)));
    } catch (error) {
      // A card that panicked has said why; it is of no use any more.
      instance = null;
      throw new Error(result() || error.message);
    }
    return { result: JSON.parse(result()), events: output(OUTPUT.EVENTS), frames: output(OUTPUT.FRAMES), room: card.memory.buffer.byteLength };
  }

  self.onmessage = async ({ data: { module, text, seed } }) => {
    try {
      const played = await run(module, text, seed);
      self.postMessage({ played }, [played.events.buffer, played.frames.buffer]);
    } catch (error) {
      self.postMessage({ problem: error.message });
    }
  };
}

/** WebAssembly does not give memory back: a worker that took more than this makes room for a new one. */
const MOST_ROOM = 256 << 20;

/** Why a run did not come to its end. */
export class Stopped extends Error {}

export class Card {
  constructor() {
    this.module = null;
    this.address = null;
    this.worker = null;
    this.waiting = null;
  }

  /** Runs a scenario: its result, its event log and its frames, in bytes. One at a time. */
  async run(text, seed) {
    if (this.waiting) throw new Error("another scenario is running");
    const ended = new Promise((resolve, reject) => { this.waiting = { resolve, reject }; });
    // It may be stopped before anybody waits for it.
    ended.catch(() => {});
    const { waiting } = this;
    try {
      this.module ??= new Response(inflated("playground")).arrayBuffer();
      const module = await this.module;
      if (this.waiting !== waiting) return await ended;
      const isNew = !this.worker;
      this.worker ??= this.start();
      this.worker.postMessage({ module: isNew ? module : null, text, seed });
      const played = await ended;
      if (played.room > MOST_ROOM) this.end();
      return played;
    } finally {
      if (this.waiting === waiting) this.waiting = null;
    }
  }

  /** Ends the run that is under way, if one is. */
  stop() {
    const { waiting } = this;
    if (!waiting) return;
    this.end();
    this.waiting = null;
    waiting.reject(new Stopped());
  }

  start() {
    this.address ??= URL.createObjectURL(new Blob([`"use strict"; (${cardInWorker})();`], { type: "text/javascript" }));
    const worker = new Worker(this.address);
    worker.onmessage = ({ data: { played, problem } }) => {
      if (played) this.waiting?.resolve(played);
      else this.waiting?.reject(new Error(problem));
    };
    worker.onerror = (event) => {
      this.end();
      this.waiting?.reject(new Error(event.message || "this browser does not let the page start a worker"));
    };
    return worker;
  }

  end() {
    this.worker?.terminate();
    this.worker = null;
  }
}
