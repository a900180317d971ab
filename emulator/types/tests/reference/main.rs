//! The tables of the reference that are made from code.

mod counters;
mod verbs;
