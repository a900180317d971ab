//! Programs that preload the library see the folder at the places of RDMA devices.

#![cfg(target_os = "linux")]

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The library that was built for this test: in the folder that it runs from.
fn library() -> PathBuf {
    std::env::current_exe().expect("a test runs from a file").with_file_name("libsofthca_sysfs.so")
}

/// A folder with a device, and a link to it as in sysfs.
fn view(name: &str) -> PathBuf {
    let root = std::env::temp_dir().join(format!("softhca-preload-{name}-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&root);
    let device = root.join("sys/devices/pci5fca:00/5fca:00:00.0/infiniband/softhca0");
    std::fs::create_dir_all(&device).expect("the temporary folder can be written");
    std::fs::write(device.join("hca_type"), "SoftHCA\n").expect("ours");
    std::fs::write(device.join("../../numa_node"), "-1\n").expect("ours");
    let classes = root.join("sys/class/infiniband");
    std::fs::create_dir_all(&classes).expect("ours");
    symlink("../../devices/pci5fca:00/5fca:00:00.0/infiniband/softhca0", classes.join("softhca0"))
        .expect("ours");
    std::fs::create_dir_all(root.join("dev/infiniband")).expect("ours");
    symlink("/dev/null", root.join("dev/infiniband/uverbs0")).expect("ours");
    root
}

/// The output of a program that preloads the library.
fn output(root: &Path, words: &[&str]) -> String {
    let mut command = Command::new(words[0]);
    command.args(&words[1..]).env("LD_PRELOAD", library()).env("SOFTHCA_SYSFS", root);
    let output = command.output().expect("the program runs");
    assert!(output.status.success(), "{words:?}: {output:?}");
    String::from_utf8_lossy(&output.stdout).trim().into()
}

/// Each line is a way to look at a path, by another function of the C library.
const SCRIPT: &str = r#"
cd /sys/class/infiniband && ls && cat softhca0/hca_type
cat /sys/class/infiniband/softhca0/../../numa_node
realpath /sys/class/infiniband/softhca0
readlink /sys/class/infiniband/softhca0
[ -c /dev/infiniband/uverbs0 ] && echo node
[ -d /sys/class/net ] && [ ! -e /sys/class/infiniband_mad ] && echo others
"#;

#[test]
fn programs_see_the_device() {
    let root = view("shell");
    let device = "devices/pci5fca:00/5fca:00:00.0/infiniband/softhca0";
    let expected = format!("softhca0\nSoftHCA\n-1\n/sys/{device}\n../../{device}\nnode\nothers");
    assert_eq!(output(&root, &["sh", "-c", SCRIPT]), expected);
    let _ = std::fs::remove_dir_all(root);
}

/// `fopen`, `scandir` and `stat` of the C library open files without the functions that programs call.
#[test]
fn functions_of_the_c_library_are_redirected_too() {
    let source = r#"
        #define _GNU_SOURCE
        #include <dirent.h>
        #include <fcntl.h>
        #include <limits.h>
        #include <stdio.h>
        #include <stdlib.h>
        #include <sys/stat.h>
        #include <unistd.h>
        int main(void) {
            char line[64], path[PATH_MAX];
            struct dirent **found;
            struct stat status;
            struct statx extended;
            FILE *file = fopen("/sys/class/infiniband/softhca0/hca_type", "r");
            if (!file || !fgets(line, sizeof line, file)) return 1;
            if (scandir("/sys/class/infiniband", &found, NULL, alphasort) != 3) return 2;
            if (stat("/sys/class/infiniband/softhca0", &status) || !S_ISDIR(status.st_mode)) return 3;
            if (lstat("/sys/class/infiniband/softhca0", &status) || !S_ISLNK(status.st_mode)) return 4;
            if (fstatat(AT_FDCWD, "/dev/infiniband/uverbs0", &status, 0) || !S_ISCHR(status.st_mode)) return 5;
            if (statx(AT_FDCWD, "/dev/infiniband", 0, STATX_TYPE, &extended)) return 6;
            if (access("/dev/infiniband/uverbs0", R_OK | W_OK)) return 7;
            int folder = open("/sys/class/infiniband", O_RDONLY | O_DIRECTORY);
            if (folder < 0 || openat(folder, "softhca0/hca_type", O_RDONLY) < 0) return 8;
            if (!realpath("/sys/class/infiniband/softhca0/../..", path)) return 9;
            if (readlink("/dev/infiniband/uverbs0", line, sizeof line) != 9) return 10;
            puts(path);
            return 0;
        }"#;
    let root = view("functions");
    let (file, program) = (root.join("look.c"), root.join("look").display().to_string());
    std::fs::write(&file, source).expect("ours");
    let Ok(built) = Command::new("cc").arg("-o").arg(&program).arg(&file).output() else {
        return eprintln!("skipped: no C compiler");
    };
    assert!(built.status.success(), "{built:?}");
    assert_eq!(output(&root, &[&program]), "/sys/devices/pci5fca:00/5fca:00:00.0");
    let _ = std::fs::remove_dir_all(root);
}
