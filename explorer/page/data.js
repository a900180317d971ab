// The data in the page.

import { Run, readStream } from "./run.js";

function base64Stream(text) {
  const STEP = 1 << 20;
  let at = 0;
  return new ReadableStream({
    pull(controller) {
      if (at >= text.length) return controller.close();
      const binary = atob(text.slice(at, at + STEP));
      at += STEP;
      const bytes = new Uint8Array(binary.length);
      for (let index = 0; index < binary.length; index++) bytes[index] = binary.charCodeAt(index);
      controller.enqueue(bytes);
    },
  });
}

/** The data of an element, as a stream. */
export function inflated(id) {
  const element = document.getElementById(id);
  const stream = base64Stream(element?.textContent ?? "").pipeThrough(new DecompressionStream("deflate-raw"));
  element?.remove();
  return stream;
}

/** The description of the page and its runs. */
export function readMeta() {
  return JSON.parse(document.getElementById("meta").textContent);
}

/** Reads the runs one after the other; calls `progressed` when more events can be shown. */
export async function readRuns(meta, runs, progressed) {
  for (const [index, about] of meta.runs.entries()) {
    const run = runs[index];
    run.expected = about.events;
    await readStream(inflated("lines-" + index), run, progressed);
    if (about.frames > 0) run.takeFrames(new Uint8Array(await new Response(inflated("frames-" + index)).arrayBuffer()));
    progressed();
  }
}

export function emptyRuns(meta) {
  return meta.runs.map((about) => {
    const run = new Run(about.name, about.source);
    run.notes.push(...about.notes);
    if (about.why) run.why = about.why;
    run.result = about.result;
    return run;
  });
}

/** Reads a file that the user opens in the page. */
export async function readFile(file, progressed) {
  const run = new Run(file.name, "log");
  const first = new Uint8Array(await file.slice(0, 4).arrayBuffer());
  if (first.length > 0 && first[0] !== 0x7b) {
    run.isComplete = true;
    run.notes.push(`${file.name} is not an event log. For a capture, create a report: softhca report ${file.name}`);
    return run;
  }
  await readStream(file.stream(), run, progressed);
  return run;
}
