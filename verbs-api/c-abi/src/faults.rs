//! Injected faults of calls that the device does not execute itself: queries, polls, the release of objects, and calls
//! before a device is open. All other calls meet their faults in the device.

use crate::call_site;
use crate::errno::Rejection;
use softhca::fault::{self, FAULTS_VARIABLE};
use softhca::{Context, Device, Error, Resource, Verb, VerbsError};
use std::sync::LazyLock;

/// Announces the calls of the process. It stays open, so that the device keeps the counts of the process even while the
/// process has no open device.
static PROCESS: LazyLock<Option<Context>> = LazyLock::new(|| {
    std::env::var_os(FAULTS_VARIABLE)?;
    fault::set_call_site_source(call_site::find);
    Device::daemon().ok().map(|device| device.open())
});

/// Prepares for faults and recordings, before the process opens a device.
pub fn prepare() {
    LazyLock::force(&PROCESS);
}

/// Whether fault rules or a recording name this verb.
#[inline]
pub fn is_announced(verb: Verb) -> bool {
    PROCESS.as_ref().is_some_and(|context| context.announces(verb))
}

/// Lets the device count a call; fails if a fault hits it. Without fault rules, this is one comparison.
#[inline]
pub fn announce(verb: Verb, object: Option<(Resource, u32)>) -> Result<(), Rejection> {
    match &*PROCESS {
        Some(context) if context.announces(verb) => match context.announce_call(verb, object) {
            // A child has no counts of its own: the rules are its parent's.
            Ok(())
            | Err(Error::Forked { .. } | Error::DeviceGone { .. } | Error::Verbs(VerbsError::DeviceFailed)) => {
                Ok(())
            }
            Err(error) => Err(error.into()),
        },
        _ => Ok(()),
    }
}
