//! Tests of the two sides of grants.

use super::*;

const BUDGET: u64 = 1 << 20;
/// An empty socket at this time ends the start of the port.
const SETTLED: u64 = GRANT_LEASE;

fn port(last: u8) -> PeerPort {
    PeerPort::from(std::net::IpAddr::from([127, 0, 0, last]))
}

fn settled_issuer(budget: u64) -> GrantIssuer {
    let mut issuer = GrantIssuer::new(budget, 0);
    issuer.on_socket_empty(SETTLED);
    issuer
}

fn request(issuer: &mut GrantIssuer, from: PeerPort, consumed: u64, now: u64) {
    let (needed, wanted) = (consumed + MAX_FRAME_CHARGE, consumed + REQUEST_AHEAD);
    issuer.on_request(from, &GrantRequest { consumed, returned: 0, needed, wanted }, now).unwrap();
}

/// The total grant of a sender that wants as much as possible.
fn granted(issuer: &mut GrantIssuer, from: PeerPort, consumed: u64, now: u64) -> u64 {
    request(issuer, from, consumed, now);
    let mut granted = 0;
    while let Some((to, grant)) = issuer.transmit(now) {
        granted = if to == from { grant.granted } else { granted };
    }
    granted
}

/// Uses grants until the sender is no newcomer. Returns what it has consumed.
fn establish(issuer: &mut GrantIssuer, from: PeerPort, now: u64) -> u64 {
    let mut consumed = 0;
    while issuer.senders.get(&from).is_none_or(SenderGrants::is_newcomer) {
        let total = granted(issuer, from, consumed, now);
        issuer.record_received(from, total - consumed);
        consumed = total;
    }
    consumed
}

#[test]
fn buffered_bytes_make_no_room_for_new_grants() {
    let mut issuer = settled_issuer(100_000);
    let peer = port(2);
    let first = granted(&mut issuer, peer, 0, SETTLED);
    assert_eq!(issuer.record_received(peer, first), first);
    issuer.add_buffered(peer, first);
    assert_eq!(issuer.outstanding(), first);
    // The socket is empty, but no more room is available than before.
    issuer.on_socket_empty(SETTLED);
    let second = granted(&mut issuer, peer, first, SETTLED);
    assert!(second <= 100_000, "{second} in all, while {first} are buffered");
    let before = issuer.available();
    issuer.limit_buffered(peer.address, 0);
    assert_eq!(issuer.available(), before + first);
    assert_eq!(issuer.record_received(port(3), 100_000), 0, "bytes without a grant are not counted");
}

#[test]
fn a_host_releases_what_is_buffered_of_all_its_processes() {
    let mut issuer = settled_issuer(100_000);
    let [own, other] = [port(2), port(3)];
    for (slot, bytes) in [(0, 1000), (1, 2000), (7, 3000)] {
        issuer.add_buffered(PeerPort { slot, ..own }, bytes);
    }
    issuer.add_buffered(other, 500);
    issuer.limit_buffered(own.address, 2500);
    assert_eq!(issuer.outstanding(), 3000);
    issuer.limit_buffered(own.address, 2600);
    assert_eq!(issuer.outstanding(), 3000, "a limit adds nothing");
    issuer.limit_buffered(own.address, 0);
    assert_eq!(issuer.outstanding(), 500);
}

#[test]
fn first_sender_leaves_room_for_the_next() {
    let mut issuer = settled_issuer(BUDGET);
    let consumed = establish(&mut issuer, port(2), SETTLED);
    let first = granted(&mut issuer, port(2), consumed, SETTLED);
    assert_eq!(first - consumed, BUDGET - BUDGET / 8);
    // The share becomes available only after the socket has been empty for a while; a new sender does not starve
    // until then.
    issuer.remove_sender(port(2), SETTLED);
    assert!(granted(&mut issuer, port(3), 0, SETTLED) > 0);
}

#[test]
fn port_that_just_started_grants_a_quarter() {
    let mut issuer = GrantIssuer::new(BUDGET, 0);
    for now in [0, 1, SETTLED - 1, SETTLED] {
        request(&mut issuer, port(2), 0, now);
        request(&mut issuer, port(3), 0, now);
        while issuer.transmit(now).is_some() {}
        assert!(issuer.outstanding() <= BUDGET / 4);
    }
    assert_eq!(issuer.next_timeout(), Some(SETTLED), "an idle port does not wait");
    issuer.on_socket_empty(SETTLED);
    assert_eq!(issuer.available() + issuer.outstanding(), BUDGET);
}

#[test]
fn impossible_totals_change_nothing() {
    let mut issuer = settled_issuer(BUDGET);
    let good = GrantRequest { consumed: 9, returned: 1, needed: 11, wanted: 12 };
    for bad in [
        GrantRequest { consumed: u64::MAX, ..good },
        GrantRequest { returned: u64::MAX, ..good },
        GrantRequest { consumed: MAX_TOTAL, ..good },
        GrantRequest { needed: 11 + MAX_FRAME_CHARGE, ..good },
        GrantRequest { wanted: u64::MAX, ..good },
    ] {
        assert_eq!(issuer.on_request(port(2), &bad, SETTLED), Err(OutOfBounds), "{bad:?}");
        assert_eq!(issuer.transmit(SETTLED), None);
    }
}

#[test]
fn newcomers_leave_half_to_a_sender_in_use() {
    let mut issuer = settled_issuer(grant_budget(212_992));
    let victim = port(1);
    let mut consumed = establish(&mut issuer, victim, SETTLED);
    for last in 2..62 {
        request(&mut issuer, port(last), 0, SETTLED);
    }
    // None of the newcomers ever uses or returns anything.
    let mut now = SETTLED;
    for _ in 0..10_000 {
        now += MILLISECOND;
        let total = granted(&mut issuer, victim, consumed, now);
        assert!(total > consumed, "no grant at {now} ns");
        issuer.record_received(victim, total - consumed);
        consumed = total;
        issuer.on_socket_empty(now);
    }
}

#[test]
fn sender_that_returns_nothing_loses_its_grant_to_one_that_waits() {
    let mut issuer = settled_issuer(4 * MAX_FRAME_CHARGE);
    let is_refused = |last: &u8| granted(&mut issuer, port(*last), 0, SETTLED) == 0;
    let last = (2..).find(is_refused).expect("the budget is finite");
    let (victim, hoarders) = (port(last), 2..last);
    assert!(!hoarders.is_empty());
    let consumed = 0;
    let mut now = SETTLED;
    let mut total = consumed;
    while total == consumed {
        now += RECLAIM_INTERVAL;
        issuer.on_socket_empty(now);
        total = granted(&mut issuer, victim, consumed, now);
        assert!(now < 100 * SETTLED, "the hoarders keep their grants");
    }
    assert!(now >= SETTLED + GRANT_LEASE, "a stopped sender may still have its lease");
    assert!(
        hoarders.into_iter().any(|hoarder| issuer.returned(port(hoarder)) > 0),
        "a heartbeat informs the hoarder"
    );
}

#[test]
fn process_that_was_stopped_itself_revokes_nothing() {
    let mut issuer = settled_issuer(2 * MAX_FRAME_CHARGE);
    let holders = [port(2), port(3)].map(|holder| {
        let consumed = establish(&mut issuer, holder, SETTLED);
        (holder, granted(&mut issuer, holder, consumed, SETTLED) - consumed)
    });
    request(&mut issuer, port(4), 0, SETTLED);
    for now in [SETTLED + 1, 100 * SETTLED, 200 * SETTLED] {
        while issuer.transmit(now).is_some() {}
    }
    assert_eq!(issuer.revocations(), 0);
    for (holder, amount) in holders {
        assert_eq!(issuer.record_received(holder, amount), amount);
    }
}

#[test]
fn sender_that_restarts_all_the_time_leaves_room() {
    let mut issuer = settled_issuer(grant_budget(212_992));
    let (victim, restarting) = (port(1), port(2));
    let mut consumed = establish(&mut issuer, victim, SETTLED);
    let mut now = SETTLED;
    for _ in 0..1000 {
        now += 2 * MILLISECOND;
        issuer.remove_sender(restarting, now);
        request(&mut issuer, restarting, MAX_TOTAL - 1, now);
        let total = granted(&mut issuer, victim, consumed, now);
        assert!(total > consumed, "no grant at {now} ns");
        issuer.record_received(victim, total - consumed);
        consumed = total;
        issuer.on_socket_empty(now);
    }
}

#[test]
fn request_that_must_wait_gets_no_reply_before_its_grant() {
    let mut issuer = settled_issuer(2 * MAX_FRAME_CHARGE);
    let holders = [port(2), port(3)];
    for holder in holders {
        let consumed = establish(&mut issuer, holder, SETTLED);
        assert!(granted(&mut issuer, holder, consumed, SETTLED) > consumed);
    }
    let waiting = port(4);
    for _ in 0..3 {
        request(&mut issuer, waiting, 0, SETTLED);
        while let Some((to, _)) = issuer.transmit(SETTLED) {
            assert_ne!(to, waiting, "an unchanged GRANT is a message for nothing");
        }
    }
    issuer.record_received(holders[0], issuer.senders[&holders[0]].outstanding());
    issuer.record_received(holders[1], issuer.senders[&holders[1]].outstanding());
    let messages: Vec<_> = std::iter::from_fn(|| issuer.transmit(SETTLED)).collect();
    assert!(messages.iter().any(|(to, grant)| *to == waiting && grant.granted > 0), "{messages:?}");
    // The sender has missed it.
    request(&mut issuer, waiting, 0, SETTLED);
    let messages: Vec<_> = std::iter::from_fn(|| issuer.transmit(SETTLED)).collect();
    assert!(messages.iter().any(|(to, _)| *to == waiting), "{messages:?}");
}

#[test]
fn sender_whose_frames_wait_in_the_socket_is_not_asked_for_them() {
    let mut issuer = settled_issuer(2 * MAX_FRAME_CHARGE);
    let holder = port(2);
    let drained = establish(&mut issuer, holder, SETTLED);
    let total = granted(&mut issuer, holder, drained, SETTLED);
    assert!(total > drained);
    // It reports that it has used everything.
    issuer
        .on_request(
            holder,
            &GrantRequest { consumed: total, returned: 0, needed: total, wanted: total },
            SETTLED,
        )
        .unwrap();
    for last in 3..6 {
        request(&mut issuer, port(last), 0, SETTLED);
    }
    for step in 0..100 {
        while let Some((to, _)) = issuer.transmit(SETTLED + step * RECLAIM_INTERVAL) {
            assert_ne!(to, holder);
        }
    }
    assert_eq!(issuer.revocations(), 0);
}
