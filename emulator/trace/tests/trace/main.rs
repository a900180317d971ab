//! Analysis of captures and logs, and the tables of the reference that are made from code.

mod captures;
mod event_log_reference;
mod filter_reference;
mod join;
mod logs;
mod perfetto;
