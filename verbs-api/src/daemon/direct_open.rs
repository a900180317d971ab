//! Opens an HCA in this process on the sockets that a daemon gave it.

use super::connection::ControlSocket;
use super::direct::{DirectHost, DirectState};
use super::opened_host::{OpenedHost, missing_descriptors};
use super::port_reservations::PortReservations;
use crate::Error;
use crate::backend::Result;
use crate::embedded::{EmbeddedRuntime, EventForwarder};
use crate::local_backend::EventBus;
use crate::memory::install_fault_handler;
use softhca_control::{DirectPath, MAX_RULES, Request};
use softhca_engine::{AckPolicy, CongestionSettings, Profile, Recovery, Settings};
use softhca_fabric::Link;
use softhca_queue::{MapMode, SharedMemory};
use softhca_udp::{
    Driver, DriverOptions, Entropy, HandOver, HostSockets, IcrcCheck, IcrcMode, Loopback, OpenRings,
    OpenSendSocket, RingPair, SlotRecorder,
};
use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// The bytes of the counters of a host's fault rules.
const RULE_COUNTERS: usize = MAX_RULES * Link::COUNTER_WORDS * 8;

/// Starts an HCA on the sockets of the process's slot.
pub(super) fn open(socket: ControlSocket, opened: OpenedHost) -> Result<EmbeddedRuntime> {
    install_fault_handler();
    let system = |what| move |source| Error::System { what, source };
    let OpenedHost { host, direct, notifications, descriptors: mut sockets, .. } = opened;
    let refused = |why: &str| Error::DeviceGone { why: why.into() };
    let DirectPath { slot, foreign_recovery, foreign_window, congestion, reserved, changes } =
        direct.ok_or_else(|| refused("it did not give this process a slot"))?;
    let unknown = || refused("it uses settings that this library does not know");
    let rule_counters = sockets.pop().ok_or_else(missing_descriptors)?;
    let rule_counters = SharedMemory::adopt(rule_counters, RULE_COUNTERS, MapMode::ReadWrite)
        .map_err(system("mapping the counters of fault rules"))?;
    let page = sockets.pop().ok_or_else(missing_descriptors)?;
    let event_bus = Arc::new(EventBus::default());
    let is_gone = Arc::new(AtomicBool::new(false));
    let sink = Box::new(EventForwarder { event_bus: event_bus.clone(), forward_to: Box::new(()) });
    let (recorder, page, acks, connections) =
        SlotRecorder::adopt(page, is_gone.clone(), sink).map_err(system("mapping the page of the slot"))?;
    let sockets = HostSockets::adopt(sockets).map_err(system("adopting the sockets of the host"))?;
    let settings = Settings {
        profile: Profile::from_name(&host.profile).ok_or_else(unknown)?,
        recovery: Recovery::from_name(&host.recovery).ok_or_else(unknown)?,
        foreign_recovery: Recovery::from_name(&foreign_recovery).ok_or_else(unknown)?,
        foreign_window,
        congestion: CongestionSettings::from_name(&congestion).ok_or_else(unknown)?,
        ack_policy: AckPolicy::Coalesce,
        min_ack_timeout: Duration::from_millis(500),
        qpn_slot: slot,
        ..Settings::default()
    };
    let loopback = Loopback::from_name(&host.loopback).ok_or_else(unknown)?;
    let (icrc, entropy) = (IcrcCheck::default(), Entropy::Off);
    let icrc_mode = IcrcMode::of(loopback).map_err(system("reading the environment"))?;
    let options = DriverOptions { settings, icrc, icrc_mode, entropy, loopback };
    let state = Arc::new(DirectState::new(event_bus.clone(), is_gone, page.clone(), changes));
    let hosts = socket.welcome.hosts.clone();
    let connection = Arc::new(socket.start_notification_thread(notifications.into(), state.clone())?);
    let open_send_socket: OpenSendSocket = Box::new({
        let connection = connection.clone();
        move |source| {
            let (_, descriptors) =
                connection.call(&Request::OpenSendSocket { source }, &[]).map_err(io::Error::other)?;
            descriptors.into_iter().next().ok_or_else(|| io::Error::other("the daemon passed no socket"))
        }
    });
    let open_rings: OpenRings = Box::new({
        let connection = connection.clone();
        move |slot| {
            let (_, descriptors) =
                connection.call(&Request::OpenRings { slot }, &[]).map_err(io::Error::other)?;
            RingPair::adopt(descriptors)
        }
    });
    let hand_over: HandOver = Box::new({
        let connection = connection.clone();
        move |packets| {
            let request = Request::HandOver { packets };
            match (connection.call(&request, &[]), request) {
                (Err(_), Request::HandOver { packets }) => packets,
                _ => Vec::new(),
            }
        }
    });
    let _ = state.connection.set(Arc::downgrade(&connection));
    let mut driver = Driver::new(sockets, options, Box::new(recorder));
    driver.set_send_socket_source(open_send_socket);
    driver.set_ring_source(open_rings);
    driver.set_hand_over(hand_over);
    driver.set_records(acks, connections);
    driver.set_publish_counters(Box::new(move |counters| page.publish(counters)));
    driver.share_rule_counters(Arc::new(rule_counters).words(0, RULE_COUNTERS / 8));
    let ports = PortReservations::with_spare(reserved);
    let host = Arc::new(DirectHost { connection, state, device: host, hosts, ports });
    EmbeddedRuntime::start(driver, event_bus, Arc::default(), host)
}
