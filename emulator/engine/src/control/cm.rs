//! The commands of the connection manager.

use crate::cm::CmContext;
use crate::{ClientId, Context, Hca, VerbsError};
use softhca_queue::cm::{Command, Reply};

impl Hca {
    /// Carries out a call of an application to the connection manager.
    pub fn execute_cm(
        &mut self,
        ctx: &mut Context<'_>,
        client: ClientId,
        call: Command,
    ) -> Result<Reply, VerbsError> {
        self.check_client(client)?;
        self.cm.call(&mut CmContext { hca: &mut self.state, ctx }, client, call)
    }

    /// How many identifiers and channels the connection manager has, and how many ended connections it
    /// remembers.
    pub fn cm_resource_counts(&self) -> [usize; 3] {
        self.cm.resource_counts()
    }
}
