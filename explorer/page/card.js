// The emulator: WebAssembly in a worker, so that the page stays usable while a scenario runs, and can stop it.

import { inflated } from "./data.js";

/** The code of the worker. It uses nothing of the page. */
function cardInWorker() {
  const OUTPUT = { RESULT: 0, EVENTS: 1, FRAMES: 2 };
  let compiled = null, instance = null;

  async function execute(module, text, seed) {
    compiled ??= await WebAssembly.compile(module);
    instance ??= await WebAssembly.instantiate(compiled, {});
    const card = instance.exports;
    const bytes = new TextEncoder().encode(text);
    const at = card.input(bytes.length);
    new Uint8Array(card.memory.buffer, at, bytes.length).set(bytes);
    const output = (kind) => new Uint8Array(card.memory.buffer, card.output(kind), card.output_length(kind)).slice();
    const result = () => new TextDecoder().decode(output(OUTPUT.RESULT));
    try {
      if (seed === null) card.check();
      else card.run(BigInt.asUintN(64, BigInt(seed)));
    } catch (error) {
      // A panic leaves its message as the result, and the instance unusable.
      instance = null;
      throw new Error(result() || error.message);
    }
    return { result: JSON.parse(result() || "{}"), events: output(OUTPUT.EVENTS), frames: output(OUTPUT.FRAMES), room: card.memory.buffer.byteLength };
  }

  let last = Promise.resolve();
  self.onmessage = ({ data: { module, text, seed } }) => {
    last = last.then(async () => {
      const isCheck = seed === null;
      try {
        const played = await execute(module, text, seed);
        self.postMessage({ isCheck, played }, [played.events.buffer, played.frames.buffer]);
      } catch (error) {
        self.postMessage({ isCheck, problem: error.message });
      }
    });
  };
}

/** WebAssembly does not return memory: a worker that uses more than this is replaced. */
const MOST_ROOM = 256 << 20;

/** The error of a run that was stopped. */
export class Stopped extends Error {}

export class Card {
  constructor() {
    this.module = null;
    this.address = null;
    this.worker = null;
    this.waiting = null;
    this.checks = [];
  }

  /** The worker with the module, which a new worker gets with its first message. */
  async post(message, isWanted = () => true) {
    this.module ??= new Response(inflated("playground")).arrayBuffer();
    const module = await this.module;
    if (!isWanted()) return;
    const isNew = !this.worker;
    this.worker ??= this.start();
    this.worker.postMessage({ module: isNew ? module : null, ...message });
  }

  /** The error of a scenario, or undefined; null if a run keeps the worker busy. */
  async check(text) {
    if (this.waiting) return null;
    const checked = new Promise((resolve) => this.checks.push(resolve));
    await this.post({ text, seed: null });
    return checked;
  }

  /** Runs a scenario: its result, its event log and its frames, in bytes. One at a time. */
  async run(text, seed) {
    if (this.waiting) throw new Error("another scenario is running");
    const ended = new Promise((resolve, reject) => { this.waiting = { resolve, reject }; });
    // It may be stopped before it is awaited.
    ended.catch(() => {});
    const { waiting } = this;
    try {
      await this.post({ text, seed }, () => this.waiting === waiting);
      const played = await ended;
      if (played.room > MOST_ROOM) this.end();
      return played;
    } finally {
      if (this.waiting === waiting) this.waiting = null;
    }
  }

  /** Stops the current run, if there is one. */
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
    worker.onmessage = ({ data: { isCheck, played, problem } }) => {
      if (isCheck) this.checks.shift()?.(played ? played.result.problem : null);
      else if (played) this.waiting?.resolve(played);
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
    for (const resolve of this.checks.splice(0)) resolve(null);
  }
}
