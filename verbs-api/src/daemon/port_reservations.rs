//! The ports of a process that runs its own connection manager: the daemon keeps those of all processes of a host.
//!
//! An identifier with a port has a second one in the daemon, which reserves the port and ends with the process. The ports
//! of clients that only connect are kept for the next connection, so that this needs no message.

use crate::backend::Result;
use parking_lot::Mutex;
use softhca_engine::CmId;
use softhca_types::cm::{CmState, Command, IdSnapshot, PortSpace, Reply};
use softhca_types::reply;
use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// The most ports of a port space that are kept for later connections.
const MAX_SPARE_PORTS: usize = 256;

/// Any port of any address.
const ANY: SocketAddr = SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), 0);

/// The ports of a process.
pub(super) struct PortReservations {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    by_identifier: BTreeMap<CmId, Reservation>,
    /// Ports for connections, the one first that was free for longest.
    spare: BTreeMap<PortSpace, VecDeque<Reservation>>,
}

/// An identifier in the daemon.
#[derive(Clone, Copy)]
struct Reservation {
    id: CmId,
    /// Its port, if it is one for connections.
    port: Option<(PortSpace, u16)>,
}

impl PortReservations {
    /// The reservations of a process that has a port for its first connection.
    pub fn with_spare(reserved: Option<(CmId, u16)>) -> PortReservations {
        let space = PortSpace::Tcp;
        let spare = reserved.map(|(id, port)| Reservation { id, port: Some((space, port)) });
        let state =
            State { spare: BTreeMap::from([(space, spare.into_iter().collect())]), ..State::default() };
        PortReservations { state: Mutex::new(state) }
    }

    /// Executes a command by `execute`, and what it needs of the daemon by `request`. The flag of `execute` marks a command
    /// that is only a part of this one.
    pub fn execute(
        &self,
        command: Command,
        mut execute: impl FnMut(Command, bool) -> Result<Reply>,
        mut request: impl FnMut(Command) -> Result<Reply>,
    ) -> Result<Reply> {
        let id = match &command {
            Command::BindAddress { id, .. }
            | Command::ResolveAddress { id, .. }
            | Command::Listen { id, .. } => *id,
            Command::DestroyId(id) => {
                let result = execute(command.clone(), false);
                self.release(*id, &mut request);
                return result;
            }
            _ => return execute(command, false),
        };
        let identifier = query(id, &mut execute)?;
        let is_idle = identifier.state == CmState::Idle;
        match command {
            Command::BindAddress { address, .. } if is_idle => {
                let address = self.reserve(id, &identifier, address, &mut request)?;
                let result = execute(Command::BindAddress { id, address }, false);
                self.release_if_failed(id, result, &mut request)
            }
            Command::ResolveAddress { source, destination, .. } if is_idle => {
                let any = unspecified(destination.ip());
                let source = source.unwrap_or(SocketAddr::new(any, 0));
                let is_any = source.port() == 0 && !identifier.reuse_address && !identifier.only_ipv6;
                let source = match is_any {
                    true => SocketAddr::new(source.ip(), self.take_port(id, &identifier, &mut request)?),
                    false => self.reserve(id, &identifier, source, &mut request)?,
                };
                let result =
                    execute(Command::ResolveAddress { id, source: Some(source), destination }, false);
                self.release_if_failed(id, result, &mut request)
            }
            Command::Listen { backlog, .. } => {
                if is_idle {
                    let address = self.reserve(id, &identifier, ANY, &mut request)?;
                    let result = execute(Command::BindAddress { id, address }, true);
                    self.release_if_failed(id, result, &mut request)?;
                }
                let reservation = self.state.lock().by_identifier.get(&id).copied();
                if let Some(reservation) = reservation {
                    request(Command::Listen { id: reservation.id, backlog })?;
                }
                execute(Command::Listen { id, backlog }, false)
            }
            command => execute(command, false),
        }
    }

    /// An identifier whose command failed keeps no port.
    fn release_if_failed(
        &self,
        id: CmId,
        result: Result<Reply>,
        request: &mut impl FnMut(Command) -> Result<Reply>,
    ) -> Result<Reply> {
        if result.is_err() {
            self.release(id, request);
        }
        result
    }

    /// A new identifier in the daemon, and its port.
    fn create(
        &self,
        identifier: &IdSnapshot,
        address: SocketAddr,
        request: &mut impl FnMut(Command) -> Result<Reply>,
    ) -> Result<(CmId, u16)> {
        let IdSnapshot { port_space, qp_type, reuse_address, only_ipv6, .. } = *identifier;
        let command = Command::ReservePort { port_space, qp_type, reuse_address, only_ipv6, address };
        loop {
            let error = match request(command.clone()) {
                Ok(reply) => return Ok(reply!(reply, Reply::Reserved(id, port) => (id, port))),
                Err(error) => error,
            };
            // Spare ports count against the limits of the process.
            let Some(spare) = self.state.lock().spare.values_mut().find_map(VecDeque::pop_front) else {
                return Err(error);
            };
            request(Command::DestroyId(spare.id))?;
        }
    }

    /// Reserves the port of an address. Returns the address with the port that it got.
    fn reserve(
        &self,
        id: CmId,
        identifier: &IdSnapshot,
        address: SocketAddr,
        request: &mut impl FnMut(Command) -> Result<Reply>,
    ) -> Result<SocketAddr> {
        let (reserved, port) = self.create(identifier, address, request)?;
        self.state.lock().by_identifier.insert(id, Reservation { id: reserved, port: None });
        Ok(SocketAddr::new(address.ip(), port))
    }

    /// A port for a connection.
    fn take_port(
        &self,
        id: CmId,
        identifier: &IdSnapshot,
        request: &mut impl FnMut(Command) -> Result<Reply>,
    ) -> Result<u16> {
        let space = identifier.port_space;
        let spare = self.state.lock().spare.get_mut(&space).and_then(VecDeque::pop_front);
        let (reservation, port) = match spare {
            Some(Reservation { id, port: Some((_, port)) }) => (id, port),
            _ => self.create(identifier, ANY, request)?,
        };
        let reservation = Reservation { id: reservation, port: Some((space, port)) };
        self.state.lock().by_identifier.insert(id, reservation);
        Ok(port)
    }

    /// An identifier of this process is gone, or needs no port.
    fn release(&self, id: CmId, request: &mut impl FnMut(Command) -> Result<Reply>) {
        let mut state = self.state.lock();
        let Some(reservation) = state.by_identifier.remove(&id) else { return };
        if let Some((space, _)) = reservation.port {
            let spare = state.spare.entry(space).or_default();
            if spare.len() < MAX_SPARE_PORTS {
                return spare.push_back(reservation);
            }
        }
        drop(state);
        // If it fails, the daemon is gone.
        let _ = request(Command::DestroyId(reservation.id));
    }
}

fn query(id: CmId, execute: &mut impl FnMut(Command, bool) -> Result<Reply>) -> Result<IdSnapshot> {
    Ok(reply!(execute(Command::QueryId(id), true)?, Reply::Query(identifier) => identifier))
}

fn unspecified(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;
    use softhca_engine::{AddressVector, QpType, VerbsError};
    use softhca_wire::{Gid, Mtu, Qpn};

    const PEER: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 9));

    fn identifier(state: CmState, port: Option<u16>) -> IdSnapshot {
        IdSnapshot {
            state,
            port_space: PortSpace::Tcp,
            qp_type: QpType::Rc,
            reuse_address: false,
            only_ipv6: false,
            local: port.map(|port| SocketAddr::new(PEER, port)),
            peer: None,
            sgid: Gid::from(PEER),
            address_vector: AddressVector::to(Gid::from(PEER)),
            path_mtu: Mtu::B1024,
            remote_qpn: Qpn::default(),
        }
    }

    /// The connection manager of a process whose identifiers are all new.
    fn own(command: Command, _: bool) -> Result<Reply> {
        Ok(match command {
            Command::QueryId(_) => Reply::Query(identifier(CmState::Idle, None)),
            _ => Reply::Done,
        })
    }

    /// A daemon that permits so many identifiers, and the commands that it got.
    struct Daemon {
        limit: usize,
        commands: Vec<Command>,
        ids: Vec<CmId>,
    }

    impl Daemon {
        fn execute(&mut self, command: Command) -> Result<Reply> {
            self.commands.push(command.clone());
            Ok(match command {
                Command::ReservePort { .. } if self.ids.len() >= self.limit => {
                    return Err(Error::from(VerbsError::Unsupported { what: "another identifier" }));
                }
                Command::ReservePort { .. } => {
                    let number = self.commands.len() as u16;
                    self.ids.push(CmId(number.into()));
                    Reply::Reserved(CmId(number.into()), 40_000 + number)
                }
                Command::DestroyId(id) => {
                    self.ids.retain(|other| *other != id);
                    Reply::Done
                }
                _ => Reply::Done,
            })
        }
    }

    fn connect(ports: &PortReservations, daemon: &mut Daemon, id: u32) {
        let (id, destination) = (CmId(id), SocketAddr::new(PEER, 7174));
        let resolve = Command::ResolveAddress { id, source: None, destination };
        ports.execute(resolve, own, |command| daemon.execute(command)).unwrap();
    }

    #[test]
    fn a_second_connection_uses_the_port_of_the_first_without_a_message() {
        let (ports, mut daemon) =
            (PortReservations::with_spare(None), Daemon { limit: 8, commands: Vec::new(), ids: Vec::new() });
        connect(&ports, &mut daemon, 1);
        let requests = daemon.commands.len();
        for id in 1..100 {
            ports.execute(Command::DestroyId(CmId(id)), own, |command| daemon.execute(command)).unwrap();
            connect(&ports, &mut daemon, id + 1);
        }
        assert_eq!(daemon.commands.len(), requests, "{:?}", daemon.commands);
        connect(&ports, &mut daemon, 101);
        assert_eq!(daemon.ids.len(), 2);
    }

    #[test]
    fn a_reservation_has_the_options_of_its_identifier_after_a_command_that_failed() {
        let (ports, mut daemon) =
            (PortReservations::with_spare(None), Daemon { limit: 1, commands: Vec::new(), ids: Vec::new() });
        let own = |command, _| match command {
            Command::QueryId(_) => {
                let identifier = identifier(CmState::Idle, None);
                Ok(Reply::Query(IdSnapshot { reuse_address: true, ..identifier }))
            }
            Command::ResolveAddress { .. } => Err(Error::from(VerbsError::Unsupported { what: "a route" })),
            _ => Ok(Reply::Done),
        };
        let (id, address) = (CmId(1), SocketAddr::new(PEER, 7174));
        let resolve = Command::ResolveAddress { id, source: None, destination: address };
        ports.execute(resolve, own, |command| daemon.execute(command)).unwrap_err();
        assert_eq!(daemon.ids, []);
        let bind = Command::BindAddress { id, address };
        ports.execute(bind, own, |command| daemon.execute(command)).unwrap();
        let is_reusable = |command: &&Command| {
            matches!(command, Command::ReservePort { reuse_address: true, only_ipv6: false, .. })
        };
        assert_eq!(daemon.commands.iter().filter(is_reusable).count(), 2, "{:?}", daemon.commands);
    }

    #[test]
    fn spare_ports_make_room_for_a_listener() {
        let (ports, mut daemon) =
            (PortReservations::with_spare(None), Daemon { limit: 2, commands: Vec::new(), ids: Vec::new() });
        (1..3).for_each(|id| connect(&ports, &mut daemon, id));
        for id in 1..3 {
            ports.execute(Command::DestroyId(CmId(id)), own, |command| daemon.execute(command)).unwrap();
        }
        assert_eq!(daemon.ids.len(), 2);
        let listen = Command::Listen { id: CmId(9), backlog: 1 };
        ports.execute(listen, own, |command| daemon.execute(command)).unwrap();
        assert!(matches!(daemon.commands.last(), Some(Command::Listen { .. })), "{:?}", daemon.commands);
        assert_eq!(daemon.ids.len(), 2);
    }
}
