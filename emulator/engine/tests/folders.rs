//! The folders of the engine depend on each other in one direction.

use std::path::Path;

fn check(folder: &Path, forbidden: &[&str]) -> usize {
    let mut files = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files += check(&path, forbidden);
            continue;
        }
        files += 1;
        let text = std::fs::read_to_string(&path).unwrap();
        for name in forbidden {
            assert!(!text.contains(name), "{} names {name}", path.display());
        }
    }
    files
}

#[test]
fn the_core_names_no_transport_and_the_connection_manager_no_transport() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    assert!(check(&source.join("core"), &["crate::transport", "crate::cm", "MadOwner"]) > 20);
    assert!(check(&source.join("cm"), &["crate::transport"]) > 10);
}
