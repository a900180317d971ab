// A live run: its events come from the server of the page.

import { LogReader, Run } from "./run.js";
import { app, redraw } from "./state.js";

/** The delay before the page connects again. */
const RECONNECT_MS = 1000;

/** A WebSocket that the server closed with this code has delivered the whole log. */
const NORMAL_CLOSURE = 1000;

/** Follows the events of a live page. */
export function followEvents(run) {
  const reader = new LogReader(run);
  const url = new URL("events", location.href);
  url.protocol = "ws:";
  let received = 0;
  const show = (connection) => {
    app.connection = connection;
    redraw();
  };
  const connect = () => {
    url.search = "?from=" + received;
    const socket = new WebSocket(url);
    socket.addEventListener("open", () => show("live"));
    socket.addEventListener("message", ({ data }) => {
      received += data.split("\n").length;
      reader.take(data + "\n");
      show("live");
    });
    socket.addEventListener("close", ({ code }) => {
      if (code === NORMAL_CLOSURE) {
        reader.finish();
        return show("");
      }
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
