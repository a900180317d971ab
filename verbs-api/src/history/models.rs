//! Plain objects that programs often build on RDMA.

use super::Model;
use std::fmt::Debug;
use std::hash::Hash;

/// A word of eight bytes with the operations of verbs, and its first value. A result is the value that was read, or the
/// previous one; a WRITE has none.
#[derive(Clone, Copy, Debug)]
pub struct Word(pub u64);

/// An operation on a [`Word`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WordOperation {
    /// Returns the value.
    Read,
    /// Replaces the value.
    Write(u64),
    /// Adds to the value and returns the previous one.
    FetchAdd {
        /// What it adds.
        add: u64,
    },
    /// Replaces the value if it equals `compare`. Returns the previous one.
    CompareSwap {
        /// The expected value.
        compare: u64,
        /// The new value.
        swap: u64,
    },
}

impl Model for Word {
    type State = u64;
    type Operation = WordOperation;
    type Result = Option<u64>;

    fn initial(&self) -> u64 {
        self.0
    }

    fn step(&self, state: &u64, operation: &WordOperation, result: Option<&Option<u64>>) -> Option<u64> {
        let (new, returned) = match *operation {
            WordOperation::Read => (*state, Some(*state)),
            WordOperation::Write(value) => (value, None),
            WordOperation::FetchAdd { add } => (state.wrapping_add(add), Some(*state)),
            WordOperation::CompareSwap { compare, swap } => {
                (if *state == compare { swap } else { *state }, Some(*state))
            }
        };
        result.is_none_or(|result| *result == returned).then_some(new)
    }

    fn changes_state(&self, operation: &WordOperation) -> bool {
        *operation != WordOperation::Read
    }
}

/// A value of any type that is read and written as a whole, and its first value. A READ returns the value, a WRITE
/// nothing.
#[derive(Clone, Copy, Debug)]
pub struct Register<T>(pub T);

/// An operation on a [`Register`].
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum RegisterOperation<T> {
    /// Returns the value.
    Read,
    /// Replaces the value.
    Write(T),
}

impl<T: Clone + Eq + Hash + Debug> Model for Register<T> {
    type State = T;
    type Operation = RegisterOperation<T>;
    type Result = Option<T>;

    fn initial(&self) -> T {
        self.0.clone()
    }

    fn step(&self, state: &T, operation: &RegisterOperation<T>, result: Option<&Option<T>>) -> Option<T> {
        let (new, returned) = match operation {
            RegisterOperation::Read => (state, Some(state)),
            RegisterOperation::Write(value) => (value, None),
        };
        result.is_none_or(|result| result.as_ref() == returned).then(|| new.clone())
    }

    fn changes_state(&self, operation: &RegisterOperation<T>) -> bool {
        *operation != RegisterOperation::Read
    }
}

/// A log to which clients append, empty at the beginning. An append returns `None`, a read the entry with this number if
/// there is one.
#[derive(Clone, Copy, Debug, Default)]
pub struct Log<T>(std::marker::PhantomData<T>);

impl<T> Log<T> {
    /// The empty log.
    pub const fn new() -> Log<T> {
        Log(std::marker::PhantomData)
    }
}

/// An operation on a [`Log`].
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum LogOperation<T> {
    /// Adds an entry at the end.
    Append(T),
    /// Returns the entry with this number, from 0.
    Read(usize),
}

impl<T: Clone + Eq + Hash + Debug> Model for Log<T> {
    type State = Vec<T>;
    type Operation = LogOperation<T>;
    type Result = Option<T>;

    fn initial(&self) -> Vec<T> {
        Vec::new()
    }

    fn step(
        &self,
        state: &Vec<T>,
        operation: &LogOperation<T>,
        result: Option<&Option<T>>,
    ) -> Option<Vec<T>> {
        match operation {
            LogOperation::Append(entry) => {
                let mut state = state.clone();
                state.push(entry.clone());
                result.is_none_or(Option::is_none).then_some(state)
            }
            LogOperation::Read(index) => {
                result.is_none_or(|result| result.as_ref() == state.get(*index)).then(|| state.clone())
            }
        }
    }

    fn changes_state(&self, operation: &LogOperation<T>) -> bool {
        matches!(operation, LogOperation::Append(_))
    }
}
