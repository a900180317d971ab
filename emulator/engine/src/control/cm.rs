//! The commands of the connection manager.

use crate::{ClientId, Context, Hca, VerbsResult};
use softhca_queue::cm::{Command, Reply};

impl Hca {
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
        self.cm.resource_counts()
    }
}
