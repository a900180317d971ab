//! The connection manager of the device.

use crate::cm::CmCall;
use crate::{ClientId, Context, Hca, MadOwner, VerbsResult};
use softhca_queue::RecordedConnection;
use softhca_types::cm::{Command, Reply};
use softhca_wire::AddressHeaders;

impl Hca {
    pub(crate) fn cm_call<'a, 'c>(&'a mut self, ctx: &'a mut Context<'c>) -> CmCall<'a, 'c> {
        CmCall { cm: &mut self.transport.cm, hca: &mut self.state, ctx }
    }

    /// The ports at which connections are taken, of all port spaces.
    pub fn listening_ports(&self) -> impl Iterator<Item = u16> {
        self.transport.cm.listening_ports()
    }

    /// Carries out a call of an application to the connection manager.
    pub fn execute_cm(
        &mut self,
        ctx: &mut Context<'_>,
        client: ClientId,
        call: Command,
    ) -> VerbsResult<Reply> {
        self.check_client(client)?;
        self.cm_call(ctx).execute(client, call)
    }

    /// How many identifiers and channels the connection manager has, and how many ended connections it
    /// remembers.
    pub fn cm_resource_counts(&self) -> [usize; 3] {
        self.transport.cm.resource_counts()
    }

    /// Lets a client have a connection manager of its own in a slot. Its identifiers here only reserve ports.
    pub fn set_client_slot(&mut self, client: ClientId, slot: u16) {
        self.state.processes.set_slot(client, slot);
    }

    /// Ends a connection of a process that is gone: its peer gets the message that it would have got from the process.
    pub fn end_recorded_connection(&mut self, ctx: &mut Context<'_>, connection: &RecordedConnection) {
        self.cm_call(ctx).end_recorded(connection);
    }

    /// The device was removed: raises the event on every identifier.
    pub fn raise_cm_device_removal(&mut self, ctx: &mut Context<'_>) {
        self.cm_call(ctx).raise_device_removal();
    }

    /// Whether an identifier listens to the service of a REQ or SIDR_REQ.
    pub fn listens_to(&self, transport: &[u8]) -> bool {
        self.transport.cm.listens_to(transport)
    }

    /// The receiver of a CM message that does not name its process.
    pub fn mad_owner(&self, addressing: &AddressHeaders, transport: &[u8]) -> MadOwner {
        self.transport.cm.mad_owner(&*self.state.processes, addressing, transport)
    }
}
