//! The text of an event, rendered from the template of its declaration.

use super::LogEvent;
use super::event::{EVENT_SCHEMAS, EventSchema};
use crate::describe::duration;
use serde_json::Value;
use softhca_engine::{Event, Instant};

/// How the values of a text are shown.
pub(crate) struct TextContext<'a> {
    /// The time of the event in nanoseconds.
    pub now_ns: u64,
    /// Why the event happened.
    pub trigger: Option<&'a str>,
    /// Formats the PSN of a request of this queue pair (`own`), of its peer (`peer`), or of the packet at hand (`either`).
    pub psn: &'a dyn Fn(&str, u32) -> String,
}

/// An HCA event in words, with its queue pair.
pub fn event_text(now: Instant, event: &Event) -> String {
    let (event, trigger) = LogEvent::from_event(event);
    let psn = |_: &str, psn: u32| format!("PSN {psn}");
    let text = event.text(&TextContext { now_ns: now.nanos(), trigger: trigger.as_deref(), psn: &psn });
    match event.queue_pair() {
        Some(qp) => format!("{qp:#x} {text}"),
        None => text,
    }
}

impl LogEvent {
    pub fn schema(&self) -> &'static EventSchema {
        let name = self.name();
        EVENT_SCHEMAS.iter().find(|schema| schema.name == name).expect("every event has a schema")
    }

    pub(crate) fn text(&self, context: &TextContext<'_>) -> String {
        let event = serde_json::to_value(self).expect("an event is JSON");
        let mut text = String::new();
        render(self.schema().text, &event["data"], context, &mut text);
        text
    }
}

/// Renders `{path}`, `{path|format}`, `{path?text if set}` and `{path!text if not set}`.
fn render(template: &str, data: &Value, context: &TextContext<'_>, out: &mut String) {
    let mut rest = template;
    while let Some(open) = rest.find('{') {
        out.push_str(&rest[..open]);
        let inner = &rest[open + 1..open + closing_brace(&rest[open..])];
        rest = &rest[open + inner.len() + 2..];
        let end = inner.find(['|', '?', '!']).unwrap_or(inner.len());
        let (path, operator) = inner.split_at(end);
        let value = match path {
            "trigger" => context.trigger.map_or(Value::Null, Value::from),
            _ => path.split('.').fold(data.clone(), |value, key| value[key].clone()),
        };
        let is_set = !matches!(value, Value::Null | Value::Bool(false)) && value != 0;
        match operator.split_at_checked(1) {
            Some(("?", text)) if is_set => render(text, data, context, out),
            Some(("!", text)) if !is_set => render(text, data, context, out),
            Some(("?" | "!", _)) => {}
            Some((_, format)) => out.push_str(&formatted(&value, format, context)),
            None => out.push_str(&plain(&value)),
        }
    }
    out.push_str(rest);
}

fn closing_brace(text: &str) -> usize {
    let mut depth = 0;
    for (index, character) in text.char_indices() {
        depth += match character {
            '{' => 1,
            '}' => -1,
            _ => 0,
        };
        if depth == 0 {
            return index;
        }
    }
    panic!("unbalanced braces in the template {text:?}")
}

fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Null => String::new(),
        other => other.to_string(),
    }
}

fn formatted(value: &Value, format: &str, context: &TextContext<'_>) -> String {
    let number = value.as_u64().unwrap_or_default();
    match format {
        "own" | "peer" | "either" => (context.psn)(format, number as u32),
        "hex" => format!("{number:#x}"),
        "words" => plain(value).replace(['-', '/'], " "),
        "until" => duration(number.saturating_sub(context.now_ns)),
        "rate" => format!("{}.{:03} Gb/s", number / 1_000_000_000, number / 1_000_000 % 1000),
        "millionths" => format!("{}.{:03}", number / 1_000_000, number / 1000 % 1000),
        "retries" => value.as_u64().map(|left| format!(", {left} retries left")).unwrap_or_default(),
        "link" => value.as_u64().map(|link| format!(" on link {link}")).unwrap_or_default(),
        "signed" => format!("{:+}", value.as_i64().unwrap_or_default()),
        "packet" => {
            let psn = value["psn"].as_u64().map(|psn| format!(" PSN {psn}")).unwrap_or_default();
            format!("a packet {} -> {}{psn}", plain(&value["source"]), plain(&value["destination"]))
        }
        _ => panic!("unknown format {format:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn templates_insert_fields_formats_and_conditional_texts() {
        let data = json!({ "psn": 7, "again": true, "peer": { "name": "bob" }, "address": 4096 });
        let psn = |of: &str, psn: u32| format!("{of} {psn}");
        let context = TextContext { now_ns: 0, trigger: Some("why"), psn: &psn };
        let mut text = String::new();
        let template =
            "{psn|own} to {peer.name} at {address|hex}{again?, again{missing!, {trigger}}}{missing?no}";
        render(template, &data, &context, &mut text);
        assert_eq!(text, "own 7 to bob at 0x1000, again, why");
    }

    #[test]
    fn every_template_uses_only_fields_of_its_event() {
        for schema in EVENT_SCHEMAS {
            let fields = schema.fields();
            for part in schema.text.split('{').skip(1) {
                let path = part.split(['|', '?', '!', '}']).next().unwrap_or_default();
                let is_known = path == "trigger" || fields.iter().any(|(name, _)| name == path);
                assert!(is_known, "{}: {path}", schema.name);
            }
        }
    }
}
