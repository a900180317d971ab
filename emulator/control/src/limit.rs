//! Limits of a process as the reason of a failed call.

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use std::io;

/// The limit of this process that is the likely reason of an error, with its remedy. `process` names it to a user.
pub fn limit_of(error: &io::Error, process: &str) -> String {
    let (resource, what, option) = match Errno::from_io_error(error) {
        Some(Errno::NOMEM) => (Resource::As, "bytes of address space", 'v'),
        Some(Errno::MFILE) => (Resource::Nofile, "open files", 'n'),
        _ => return String::new(),
    };
    let limit = getrlimit(resource).current;
    limit.map_or_else(String::new, |limit| {
        format!("; the limit of {process} is {limit} {what}: start it with a larger `ulimit -{option}`")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_that_a_limit_causes_names_it() {
        let open_files = getrlimit(Resource::Nofile).current.expect("the system limits open files");
        let text = limit_of(&Errno::MFILE.into(), "the daemon");
        let expected = format!("the limit of the daemon is {open_files} open files");
        assert!(text.contains(&expected) && text.contains("ulimit -n"), "{text}");
        assert_eq!(limit_of(&Errno::IO.into(), "the daemon"), "");
    }
}
