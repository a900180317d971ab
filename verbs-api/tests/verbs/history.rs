//! Histories: the checker agrees with all permutations, and its counterexamples are small and readable.

use softhca::history::{
    Bounds, Consistency, History, HistoryError, Log, LogOperation, Model, Word, WordOperation,
};
use softhca::sim::World;
use std::collections::BTreeMap;

/// A generator of numbers, for histories that are the same in every run.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

/// An operation with the places of its call and its end.
#[derive(Clone, Debug)]
struct Operation {
    client: usize,
    operation: WordOperation,
    result: Option<u64>,
    call: usize,
    end: Option<usize>,
}

/// A random history of three clients: results are plausible and often wrong.
fn random_operations(numbers: &mut Numbers) -> Vec<Operation> {
    let mut operations: Vec<Operation> = Vec::new();
    let mut in_progress: [Option<usize>; 3] = [None; 3];
    for event in 0..12 {
        let client = numbers.below(3) as usize;
        match in_progress[client] {
            Some(index) => {
                let result = match operations[index].operation {
                    WordOperation::Write(_) => None,
                    _ => Some(numbers.below(3)),
                };
                (operations[index].end, operations[index].result) = (Some(event), result);
                in_progress[client] = None;
            }
            None if operations.len() < 6 => {
                let operation = match numbers.below(4) {
                    0 => WordOperation::Read,
                    1 => WordOperation::Write(numbers.below(3)),
                    2 => WordOperation::FetchAdd { add: 1 },
                    _ => WordOperation::CompareSwap { compare: numbers.below(2), swap: numbers.below(3) },
                };
                in_progress[client] = Some(operations.len());
                operations.push(Operation { client, operation, result: None, call: event, end: None });
            }
            None => {}
        }
    }
    operations
}

fn history(operations: &[Operation]) -> History<Word> {
    let history = History::default();
    let mut invocations = BTreeMap::new();
    for event in 0..12 {
        for (index, operation) in operations.iter().enumerate() {
            if operation.call == event {
                let client = ["alice", "bob", "carol"][operation.client];
                invocations.insert(index, history.invoke(client, operation.operation));
            }
            if operation.end == Some(event) {
                history.respond(invocations.remove(&index).unwrap(), operation.result);
            }
        }
    }
    history
}

/// Whether some order of the operations, with or without those in progress, explains the results.
fn some_order_explains(operations: &[Operation], consistency: Consistency) -> bool {
    fn extend(
        operations: &[Operation],
        consistency: Consistency,
        taken: &mut Vec<usize>,
        state: u64,
    ) -> bool {
        let left: Vec<usize> = (0..operations.len()).filter(|index| !taken.contains(index)).collect();
        if left.iter().all(|index| operations[*index].end.is_none()) {
            return true;
        }
        left.iter().copied().any(|next| {
            let comes_later = |other: &usize| {
                let (other, next) = (&operations[*other], &operations[next]);
                match consistency {
                    Consistency::Linearizable => other.end.is_some_and(|end| end < next.call),
                    Consistency::Sequential => other.client == next.client && other.call < next.call,
                }
            };
            if left.iter().any(comes_later) {
                return false;
            }
            let Operation { operation, result, end, .. } = &operations[next];
            let Some(state) = Word(0).step(&state, operation, end.map(|_| result)) else { return false };
            taken.push(next);
            let explains = extend(operations, consistency, taken, state);
            taken.pop();
            explains
        })
    }
    extend(operations, consistency, &mut Vec::new(), 0)
}

#[test]
fn the_checker_agrees_with_all_permutations() {
    let mut verdicts: BTreeMap<(String, bool), u32> = BTreeMap::new();
    for seed in 0..3_000 {
        let operations = random_operations(&mut Numbers(seed));
        for consistency in [Consistency::Linearizable, Consistency::Sequential] {
            let expected = some_order_explains(&operations, consistency);
            let checked = history(&operations).check(&Word(0), consistency);
            assert_eq!(checked.is_ok(), expected, "seed {seed}, {consistency}: {operations:?}\n{checked:?}");
            *verdicts.entry((consistency.to_string(), expected)).or_default() += 1;
            let Err(HistoryError::Inconsistent(counterexample)) = checked else { continue };
            // What it shows is still inconsistent, and no more than the history.
            assert!(counterexample.operations.len() + counterexample.omitted == operations.len());
            assert!(counterexample.longest_order.len() < counterexample.operations.len(), "{counterexample}");
        }
    }
    assert!(verdicts.values().all(|count| *count > 300), "{verdicts:?}");
}

#[test]
fn a_counterexample_is_a_ladder_of_the_operations_concerned() {
    let mut world = World::new(1);
    let history = History::<Word>::default();
    for (name, first) in [("alice", 5), ("bob", 6)] {
        let history = history.clone();
        world.host(name, move |_| async move {
            // Far from the conflict, and in the past of both.
            for value in 0..10 {
                let write = history.invoke(name, WordOperation::Write(value));
                history.respond(write, None);
            }
            softhca::sleep(std::time::Duration::from_micros(first)).await;
            let add = history.invoke(name, WordOperation::FetchAdd { add: 1 });
            softhca::sleep(std::time::Duration::from_micros(2)).await;
            history.respond(add, Some(9));
            let read = history.invoke(name, WordOperation::Read);
            history.respond(read, Some(11));
        });
    }
    world.check(move || history.check(&Word(0), Consistency::Linearizable));
    let failure = world.run().unwrap_err().to_string();
    let expected = "\
not linearizable: no order of these 2 operations explains their results
the object is 9 before them; 22 other operations are omitted
           time  alice                  bob
       5.000 µs  ┌ FetchAdd { add: 1 }
       6.000 µs  │                      ┌ FetchAdd { add: 1 }
       7.000 µs  └ Some(9)              │
       8.000 µs                         └ Some(9)
the longest possible order: alice FetchAdd { add: 1 } → Some(9)
the object is then 10, which does not permit: bob FetchAdd { add: 1 } → Some(9)
  to see it again: World::new(1)";
    assert_eq!(failure, expected, "\n{failure}");
}

#[test]
fn a_stale_read_is_sequentially_consistent_and_not_linearizable() {
    let history = History::<Word>::default();
    let write = history.invoke("alice", WordOperation::Write(1));
    history.respond(write, None);
    let read = history.invoke("bob", WordOperation::Read);
    history.respond(read, Some(0));
    assert_eq!(history.check(&Word(0), Consistency::Sequential), Ok(()));
    assert!(history.check(&Word(0), Consistency::Linearizable).is_err());
    // Going back in time is neither.
    for value in [1, 0] {
        let read = history.invoke("bob", WordOperation::Read);
        history.respond(read, Some(value));
    }
    assert!(history.check(&Word(0), Consistency::Sequential).is_err());
}

#[test]
fn an_operation_without_a_result_may_have_taken_effect() {
    for value in [0, 1] {
        let history = History::<Word>::default();
        let _lost = history.invoke("alice", WordOperation::Write(1));
        let read = history.invoke("bob", WordOperation::Read);
        history.respond(read, Some(value));
        assert_eq!(history.check(&Word(0), Consistency::Linearizable), Ok(()));
    }
}

#[test]
fn a_check_that_reaches_a_bound_is_undecided() {
    let history = History::<Log<u64>>::default();
    let appends: Vec<_> = (0..12)
        .map(|value| history.invoke(&format!("client {value}"), LogOperation::Append(value)))
        .collect();
    appends.into_iter().for_each(|append| history.respond(append, None));
    let read = history.invoke("reader", LogOperation::Read(0));
    history.respond(read, Some(99));
    let bounds = Bounds { steps: 10_000, ..Bounds::default() };
    let undecided = history.check_within(&Log::new(), Consistency::Linearizable, bounds).unwrap_err();
    assert_eq!(
        undecided.to_string(),
        "undecided: 10000 steps do not suffice to decide whether the history of 13 operations is linearizable: let \
         fewer operations overlap, or raise Bounds::steps"
    );
    let bounds = Bounds { operations: 12, ..Bounds::default() };
    let undecided = history.check_within(&Log::new(), Consistency::Linearizable, bounds).unwrap_err();
    assert!(undecided.to_string().starts_with("undecided: the history has 13 operations"), "{undecided}");
}

#[test]
fn a_long_history_without_much_overlap_is_checked_within_the_default_bounds() {
    let history = History::<Word>::default();
    for value in 0..4_000 {
        let first = history.invoke("alice", WordOperation::FetchAdd { add: 1 });
        let second = history.invoke("bob", WordOperation::FetchAdd { add: 1 });
        history.respond(first, Some(2 * value + 1));
        history.respond(second, Some(2 * value));
    }
    assert_eq!(history.check(&Word(0), Consistency::Linearizable), Ok(()));
    let last = history.invoke("alice", WordOperation::Read);
    history.respond(last, Some(1));
    let error = history.check(&Word(0), Consistency::Linearizable).unwrap_err();
    let HistoryError::Inconsistent(counterexample) = &error else { panic!("{error}") };
    assert_eq!((counterexample.operations.len(), counterexample.before.as_str()), (1, "8000"), "{error}");
}

/// Words with numbers: each is an object of its own.
struct Words;

impl Model for Words {
    type State = BTreeMap<u64, u64>;
    type Operation = (u64, WordOperation);
    type Result = Option<u64>;

    fn initial(&self) -> BTreeMap<u64, u64> {
        BTreeMap::new()
    }

    fn step(
        &self,
        state: &BTreeMap<u64, u64>,
        (key, operation): &(u64, WordOperation),
        result: Option<&Option<u64>>,
    ) -> Option<BTreeMap<u64, u64>> {
        let new = Word(0).step(state.get(key).unwrap_or(&0), operation, result)?;
        let mut state = state.clone();
        state.insert(*key, new);
        Some(state)
    }

    fn object(&self, (key, _): &(u64, WordOperation)) -> u64 {
        *key
    }
}

#[test]
fn independent_objects_are_checked_one_by_one() {
    let history = History::<Words>::default();
    // Thirty operations that all overlap: together they have far more orders than the bounds allow.
    let adds: Vec<_> = (0..30)
        .map(|client| {
            history.invoke(&format!("client {client}"), (client % 10, WordOperation::FetchAdd { add: 1 }))
        })
        .collect();
    for (client, add) in (0u64..).zip(adds) {
        history.respond(add, Some(2 - client / 10));
    }
    assert_eq!(history.check(&Words, Consistency::Linearizable), Ok(()));
    let read = history.invoke("reader", (3, WordOperation::Read));
    history.respond(read, Some(2));
    let error = history.check(&Words, Consistency::Linearizable).unwrap_err();
    let HistoryError::Inconsistent(counterexample) = &error else { panic!("{error}") };
    assert_eq!((counterexample.operations.len(), counterexample.before.as_str()), (1, "{3: 3}"), "{error}");
}

#[test]
#[should_panic = "client \"alice\" begins an operation while another one has no result"]
fn a_client_is_sequential() {
    let history = History::<Word>::default();
    let _first = history.invoke("alice", WordOperation::Read);
    let _second = history.invoke("alice", WordOperation::Read);
}
