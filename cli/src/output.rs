//! Where a command writes to.

use std::fs::File;
use std::io::{Error, ErrorKind};
use std::path::Path;

/// Creates the file that an option names, or empties it; says what to do if that cannot be.
pub fn create(option: &str, path: &Path) -> Result<File, String> {
    File::create(path).map_err(|error| write_error(option, path, &error))
}

/// Opens the file that an option names, or creates it, and leaves what is in it: see [`empty`].
pub fn open(option: &str, path: &Path) -> Result<File, String> {
    let opened = File::options().write(true).create(true).truncate(false).open(path);
    opened.map_err(|error| write_error(option, path, &error))
}

/// Empties a file, once whatever is to write it has started. What is no plain file, like a pipe, has nothing to empty.
pub fn truncate(file: &File) -> std::io::Result<()> {
    if file.metadata()?.is_file() { file.set_len(0) } else { Ok(()) }
}

/// Why the file that an option names cannot be written, and what to do.
pub fn write_error(option: &str, path: &Path, error: &Error) -> String {
    let advice = match error.kind() {
        ErrorKind::IsADirectory => "name a file in it",
        ErrorKind::NotFound | ErrorKind::NotADirectory => {
            "make its folder first, or name a file in a folder that there is"
        }
        _ => "name a file that you may write",
    };
    format!("cannot write {} ({option}): {error}; {advice}", path.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_says_what_and_where_and_why_and_what_to_do() {
        let text = create("--capture", Path::new("/no/such/folder/x.pcapng")).unwrap_err();
        assert!(text.starts_with("cannot write /no/such/folder/x.pcapng (--capture): "), "{text}");
        assert!(text.ends_with("make its folder first, or name a file in a folder that there is"), "{text}");
        let folder = std::env::temp_dir();
        let text = create("--log", &folder).unwrap_err();
        assert!(text.contains(" (--log): ") && text.ends_with("; name a file in it"), "{text}");
        let denied = ErrorKind::PermissionDenied.into();
        assert!(write_error("--log", &folder, &denied).ends_with("; name a file that you may write"));
    }
}
