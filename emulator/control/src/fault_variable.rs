//! The faults of a program as the value of an environment variable.

use core::fmt::Write;
use softhca_types::ProgramFaults;

/// The faults as the value of a variable.
pub fn faults_to_text(faults: &ProgramFaults) -> String {
    crate::encode(faults).into_iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// The faults in the value of a variable. `None` if this version did not write it.
pub fn faults_from_text(text: &str) -> Option<ProgramFaults> {
    let digits =
        text.as_bytes().chunks(2).map(|pair| u8::from_str_radix(str::from_utf8(pair).ok()?, 16).ok());
    crate::decode(&digits.collect::<Option<Vec<u8>>>()?).ok()
}
