//! Puts the shared library of a dependency into a program.
//!
//! A dependency of type `cdylib` and `rlib` leaves both files in one folder. Cargo names the `rlib` on the command line
//! of the program's compiler, which runs this macro.

use proc_macro::TokenStream;
use std::fs;
use std::path::{Path, PathBuf};

/// The bytes of the shared library of the crate with this name: an `Option<&[u8]>`. It is `None` where the compiler
/// only checks the program, because then no library exists.
#[proc_macro]
pub fn embed_library(name: TokenStream) -> TokenStream {
    let code = match find(&name.to_string(), std::env::args()) {
        Some(path) if path.is_file() => format!("Some(include_bytes!({path:?}) as &[u8])"),
        Some(path) => format!("compile_error!(\"{} was not built with its crate\")", path.display()),
        None => "None".into(),
    };
    code.parse().expect("an expression")
}

/// The shared library beside the `rlib` that an argument such as `name=folder/libname.rlib` names.
fn find(name: &str, arguments: impl Iterator<Item = String>) -> Option<PathBuf> {
    arguments.flat_map(expand).find_map(|argument| {
        let (crate_name, path) = argument.split_once('=')?;
        // Options such as `priv:` precede the name.
        let is_named = crate_name.rsplit(':').next() == Some(name);
        let path = Path::new(path);
        (is_named && path.extension()? == "rlib").then(|| path.with_extension("so"))
    })
}

/// An argument `@file` stands for the lines of the file: cargo uses one if the command line is too long.
fn expand(argument: String) -> Vec<String> {
    match argument.strip_prefix('@').map(fs::read_to_string) {
        Some(Ok(text)) => text.lines().map(String::from).collect(),
        _ => vec![argument],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> impl Iterator<Item = String> {
        line.split(' ').map(String::from)
    }

    #[test]
    fn the_library_is_beside_the_rlib() {
        let line = "rustc --extern other=/a/libother.rlib --extern priv:verbs=/b/libverbs-1f.rlib";
        assert_eq!(find("verbs", words(line)), Some("/b/libverbs-1f.so".into()));
    }

    #[test]
    fn a_check_has_no_library() {
        assert_eq!(find("verbs", words("rustc --extern verbs=/b/libverbs.rmeta")), None);
        assert_eq!(find("verbs", words("rustc --extern more_verbs=/b/libmore_verbs.rlib")), None);
    }

    #[test]
    fn arguments_may_be_in_a_file() {
        let file = std::env::temp_dir().join(format!("softhca-embed-{}", std::process::id()));
        fs::write(&file, "--extern\nverbs=/b/libverbs.rlib\n").unwrap();
        let found = find("verbs", words(&format!("rustc @{}", file.display())));
        fs::remove_file(&file).unwrap();
        assert_eq!(found, Some("/b/libverbs.so".into()));
    }
}
