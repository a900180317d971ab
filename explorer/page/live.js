// A live run: its events come from the server of the page.

import { LogReader, Run } from "./run.js";
import { app, redraw } from "./state.js";

/** The delay before the page connects again. */
const RECONNECT_MS = 1000;

/** Follows the events of a live page. */
export function followEvents(run) {
  const reader = new LogReader(run);
  const url = new URL("events", location.href);
  let received = 0;
  const show = (connection) => {
    app.connection = connection;
    redraw();
  };
  const connect = () => {
    url.search = "?from=" + received;
    const source = new EventSource(url);
    source.addEventListener("open", () => show("live"));
    source.addEventListener("message", ({ data }) => {
      received += data.split("\n").length;
      reader.take(data + "\n");
      show("live");
    });
    source.addEventListener("end", () => {
      source.close();
      reader.finish();
      show("");
    });
    source.addEventListener("error", () => {
      source.close();
      show("not connected");
      setTimeout(connect, RECONNECT_MS);
    });
  };
  connect();
}

export function liveRun(about) {
  const run = new Run(about.name, "log");
  run.notes.push(...about.notes);
  return run;
}
