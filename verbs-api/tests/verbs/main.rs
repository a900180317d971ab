//! The Rust API, on simulated and on embedded devices, and its examples.

mod cm;
mod examples;
mod history;
mod one_sided;
mod recording;
mod restart;
mod tokio;
mod verbs;
mod world;

use std::net::UdpSocket;
use std::sync::atomic::{AtomicUsize, Ordering};

/// An address for a card, apart from those that cards take by themselves, which no other run of these tests has, and
/// another one for every call.
pub fn free_address() -> String {
    static CALLS: AtomicUsize = AtomicUsize::new(0);
    let first = std::process::id() as usize + CALLS.fetch_add(1, Ordering::Relaxed);
    let address =
        |index: usize| format!("127.0.{}.{}", 1 + (first + index) / 250 % 250, 2 + (first + index) % 250);
    let is_free = |address: &String| UdpSocket::bind((address.as_str(), 4791)).is_ok();
    (0..1000).map(address).find(is_free).expect("a free address")
}
