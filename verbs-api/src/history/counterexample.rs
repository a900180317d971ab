//! The least operations of a history that no order explains, as a ladder of clients over time.

use super::search::{Outcome, Partial, Search};
use super::{Consistency, Entry, Model};
use crate::Instant;
use std::fmt::{self, Write};

/// An operation of a counterexample, as text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordedOperation {
    /// The client.
    pub client: String,
    /// The operation with its arguments.
    pub operation: String,
    /// The result, if the client has it.
    pub result: Option<String>,
    /// The time of the call.
    pub called_at: Instant,
    /// The time of the result.
    pub ended_at: Option<Instant>,
    call: u64,
    end: Option<u64>,
}

impl fmt::Display for RecordedOperation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} → {}", self.client, self.operation, self.result.as_deref().unwrap_or("?"))
    }
}

/// Operations that no order explains. It prints as a ladder: a column for each client, time from top to bottom.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counterexample {
    /// What the operations violate.
    pub consistency: Consistency,
    /// The value of the object before them.
    pub before: String,
    /// Operations in the order of their calls.
    pub operations: Vec<RecordedOperation>,
    /// The longest order that explains the results of its operations, as indices.
    pub longest_order: Vec<usize>,
    /// The value of the object after it.
    pub after: String,
    /// Operations of the history that the counterexample omits.
    pub omitted: usize,
}

/// Finds a small part of a history that is inconsistent.
///
/// For linearizability, the part ends with the first result that no order explains, and begins at the last moment at
/// which no operation was in progress and the value is certain. Operations that change nothing are omitted as long as no
/// order explains the others.
pub(super) fn minimize<M: Model>(search: &Search<'_, M>, entries: Vec<Entry<M>>) -> Counterexample {
    let total = entries.len();
    let mut before = vec![search.model.initial()];
    let is_unexplained = |entries: &[Entry<M>], before: &[M::State]| {
        matches!(search.run(entries, before), Outcome::Unexplained(_))
    };
    let mut part = entries;
    if search.consistency == Consistency::Linearizable {
        let mut ends: Vec<u64> = part.iter().filter_map(|entry| entry.end).collect();
        ends.sort();
        // A history that an order explains has no beginning that none explains.
        let first = ends.partition_point(|end| !is_unexplained(&until(&part, *end), &before));
        if let Some(end) = ends.get(first) {
            part = until(&part, *end);
        }
        let mut earliest_call = part.last().map_or(0, |entry| entry.call);
        for index in (1..part.len()).rev() {
            earliest_call = earliest_call.min(part[index].call);
            let is_quiet = part[..index].iter().all(|entry| entry.end.is_some_and(|end| end < earliest_call));
            if !is_quiet {
                continue;
            }
            match search.final_states(&part[..index], &before).as_deref() {
                Some([state]) if is_unexplained(&part[index..], core::slice::from_ref(state)) => {
                    before = vec![state.clone()];
                    part.drain(..index);
                    break;
                }
                _ => {}
            }
        }
    }
    for index in (0..part.len()).rev() {
        if !search.model.changes_state(&part[index].operation) {
            let omitted = part.remove(index);
            if !is_unexplained(&part, &before) {
                part.insert(index, omitted);
            }
        }
    }
    let longest = match search.run(&part, &before) {
        Outcome::Unexplained(longest) => longest,
        _ => Partial { order: Vec::new(), state: before[0].clone() },
    };
    Counterexample {
        consistency: search.consistency,
        before: format!("{:?}", before[0]),
        omitted: total - part.len(),
        operations: part.iter().map(describe).collect(),
        longest_order: longest.order,
        after: format!("{:?}", longest.state),
    }
}

/// The history up to the end of an operation. Operations in progress have no result.
fn until<M: Model>(entries: &[Entry<M>], end: u64) -> Vec<Entry<M>> {
    let begun = entries.iter().filter(|entry| entry.call < end).cloned();
    begun
        .map(|entry| match entry.end {
            Some(own) if own > end => Entry { end: None, ended_at: None, result: None, ..entry },
            _ => entry,
        })
        .collect()
}

fn describe<M: Model>(entry: &Entry<M>) -> RecordedOperation {
    RecordedOperation {
        client: entry.client.clone(),
        operation: format!("{:?}", entry.operation),
        result: entry.result.as_ref().map(|result| format!("{result:?}")),
        called_at: entry.called_at,
        ended_at: entry.ended_at,
        call: entry.call,
        end: entry.end,
    }
}

impl Counterexample {
    /// The clients in the order of their first calls.
    fn clients(&self) -> Vec<&str> {
        let mut clients: Vec<&str> = Vec::new();
        for operation in &self.operations {
            if !clients.contains(&operation.client.as_str()) {
                clients.push(&operation.client);
            }
        }
        clients
    }

    fn write_ladder(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let clients = self.clients();
        // Each row is a call or a result: its place in the order of events, time, client, text.
        let mut rows = Vec::new();
        for operation in &self.operations {
            let column = clients.iter().position(|client| *client == operation.client);
            let column = column.expect("clients has all of them");
            rows.push((operation.call, operation.called_at, column, format!("┌ {}", operation.operation)));
            if let (Some(end), Some(at), Some(result)) =
                (operation.end, operation.ended_at, &operation.result)
            {
                rows.push((end, at, column, format!("└ {result}")));
            }
        }
        rows.sort();
        let width = |column: usize| {
            let texts = rows.iter().filter(|row| row.2 == column).map(|row| row.3.chars().count());
            texts.chain([clients[column].chars().count()]).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..clients.len()).map(width).collect();
        let mut line = format!("{:>15}", "time");
        for (client, width) in clients.iter().zip(&widths) {
            write!(line, "  {client:<width$}")?;
        }
        writeln!(f, "{}", line.trim_end())?;
        let mut in_progress = vec![false; clients.len()];
        for (_, at, column, text) in &rows {
            let mut line = format!("{:>12.3} µs", at.nanos() as f64 / 1000.0);
            for (other, width) in widths.iter().enumerate() {
                let cell = match (other == *column, in_progress[other]) {
                    (true, _) => text.as_str(),
                    (false, true) => "│",
                    (false, false) => "",
                };
                write!(line, "  {cell:<width$}")?;
            }
            in_progress[*column] = text.starts_with('┌');
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

impl fmt::Display for Counterexample {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Counterexample { consistency, before, operations, longest_order, after, omitted } = self;
        writeln!(
            f,
            "not {consistency}: no order of these {} operations explains their results",
            operations.len()
        )?;
        write!(f, "the object is {before} before them")?;
        match omitted {
            0 => writeln!(f)?,
            1 => writeln!(f, "; 1 other operation is omitted")?,
            _ => writeln!(f, "; {omitted} other operations are omitted")?,
        }
        self.write_ladder(f)?;
        let order: Vec<String> = longest_order.iter().map(|index| operations[*index].to_string()).collect();
        let left = (0..operations.len()).filter(|index| !longest_order.contains(index));
        let left: Vec<String> = left.map(|index| operations[index].to_string()).collect();
        if !order.is_empty() {
            writeln!(f, "the longest possible order: {}", order.join(", "))?;
        }
        write!(f, "the object is then {after}, which does not permit: {}", left.join(", "))
    }
}
