// A run that goes on: events come from the server that served the page.

import { LogReader, Run } from "./run.js";
import { app, redraw } from "./state.js";

/** Follows the events of a live page. */
export function followEvents(run) {
  const reader = new LogReader(run);
  const source = new EventSource("events");
  source.addEventListener("message", (message) => {
    reader.take(message.data + "\n");
    app.connection = "live";
    redraw();
  });
  source.addEventListener("open", () => {
    app.connection = "live";
    redraw();
  });
  source.addEventListener("error", () => {
    app.connection = "not connected";
    redraw();
  });
  source.addEventListener("end", () => {
    source.close();
    app.connection = "";
    reader.finish();
    redraw();
  });
}

export function liveRun(about) {
  const run = new Run(about.name, "log");
  run.notes.push(...about.notes);
  return run;
}
