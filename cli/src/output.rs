//! Output files of a command.

use std::fs::File;
use std::io::{Error, ErrorKind};
use std::path::Path;

/// Creates or truncates the file that an option names. The error says how to fix it.
pub fn create(option: &str, path: &Path) -> Result<File, String> {
    File::create(path).map_err(|error| write_error(option, path, &error))
}

/// Opens or creates the file that an option names, and keeps its contents: see [`truncate`].
pub fn open(option: &str, path: &Path) -> Result<File, String> {
    let opened = File::options().write(true).create(true).truncate(false).open(path);
    opened.map_err(|error| write_error(option, path, &error))
}

/// Truncates a file once its writer has started. Pipes and other special files have nothing to truncate.
pub fn truncate(file: &File) -> std::io::Result<()> {
    if file.metadata()?.is_file() { file.set_len(0) } else { Ok(()) }
}

/// The message for a file that cannot be written: option, cause and fix.
pub fn write_error(option: &str, path: &Path, error: &Error) -> String {
    let advice = match error.kind() {
        ErrorKind::IsADirectory => "give a file in that folder",
        ErrorKind::NotFound | ErrorKind::NotADirectory => {
            "create the folder first, or give a file in an existing folder"
        }
        _ => "give a file that you may write",
    };
    format!("cannot write {} ({option}): {error}; {advice}", path.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn write_errors_name_the_file_the_option_the_cause_and_the_fix() {
        let text = create("--capture", Path::new("/no/such/folder/x.pcapng")).unwrap_err();
        assert!(text.starts_with("cannot write /no/such/folder/x.pcapng (--capture): "), "{text}");
        assert!(text.ends_with("create the folder first, or give a file in an existing folder"), "{text}");
        let folder = std::env::temp_dir();
        let text = create("--log", &folder).unwrap_err();
        assert!(text.contains(" (--log): ") && text.ends_with("; give a file in that folder"), "{text}");
        let denied = ErrorKind::PermissionDenied.into();
        assert!(write_error("--log", &folder, &denied).ends_with("; give a file that you may write"));
    }
}
