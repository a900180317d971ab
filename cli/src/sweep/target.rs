//! The target of a sweep: one program, or the programs of a file, and the check of their outcome.

use serde::Deserialize;
use std::path::{Path, PathBuf};

/// Programs that run together.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Target {
    /// The programs, in the order in which they start.
    pub program: Vec<Program>,
    /// A command that ends with 0 if the outcome is right. It runs in the folder of the outputs. By default the exit codes
    /// and the standard output must be those of the run without faults.
    pub check: Option<Vec<String>>,
    /// The folder of the file. The programs run there.
    #[serde(skip)]
    pub folder: PathBuf,
}

/// A program.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Program {
    /// Its role: the name in points and reports.
    pub name: String,
    /// Its host.
    #[serde(default = "first_host")]
    pub host: String,
    /// Program and arguments. `${ADDRESS_bob}` is the address of bob, `${PORT}` a free TCP port.
    pub command: Vec<String>,
    /// The next program starts when this text is in its output; at once by default.
    pub ready: Option<String>,
    /// The next program starts when a program listens on the TCP port `${PORT}`, which is free and differs between workers.
    #[serde(default)]
    pub ready_tcp: bool,
    /// The next program starts when this program listens for connections of the connection manager.
    #[serde(default)]
    pub ready_listen: bool,
    /// It serves until the other programs have ended, and is then terminated. Its exit code does not count.
    #[serde(default)]
    pub service: bool,
}

fn first_host() -> String {
    "alice".into()
}

impl Target {
    /// The target of a command line.
    pub fn of_command(words: &[String]) -> Target {
        let name = Path::new(&words[0])
            .file_name()
            .map_or("program".into(), |name| name.to_string_lossy().into_owned());
        let program = Program {
            name,
            host: first_host(),
            command: words.to_vec(),
            ready: None,
            ready_tcp: false,
            ready_listen: false,
            service: false,
        };
        Target { program: vec![program], check: None, folder: PathBuf::from(".") }
    }

    /// Reads a file. The error names the line and what is wrong.
    pub fn read(path: &Path) -> Result<Target, String> {
        let text = std::fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
        let mut target: Target = toml::from_str(&text)
            .map_err(|error| format!("{}: {}", path.display(), error.to_string().trim_end()))?;
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        target.folder = parent.unwrap_or(Path::new(".")).to_path_buf();
        target.check_names().map_err(|why| format!("{}: {why}", path.display()))?;
        Ok(target)
    }

    fn check_names(&self) -> Result<(), String> {
        if self.program.is_empty() {
            return Err("no [[program]]".into());
        }
        for (index, program) in self.program.iter().enumerate() {
            if program.command.is_empty() {
                return Err(format!("program {:?} has no command", program.name));
            }
            if program.name.is_empty() || program.name.contains([':', ' ', '/']) {
                return Err(format!("program {:?}: a name has no ':', '/' or space", program.name));
            }
            if self.program[..index].iter().any(|other| other.name == program.name) {
                return Err(format!("two programs have the name {:?}", program.name));
            }
        }
        if self.program.iter().all(|program| program.service) {
            return Err("every program is a service: nothing ends".into());
        }
        Ok(())
    }

    /// The index of a program.
    pub fn role_of(&self, name: &str) -> Option<usize> {
        self.program.iter().position(|program| program.name == name)
    }

    /// The hosts, each once.
    pub fn hosts(&self) -> Vec<String> {
        let mut hosts: Vec<String> = Vec::new();
        for program in &self.program {
            if !hosts.contains(&program.host) {
                hosts.push(program.host.clone());
            }
        }
        hosts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bad_file_is_an_error_with_its_place() {
        let parse = |text: &str| -> Result<Target, String> {
            let target: Target = toml::from_str(text).map_err(|error| error.to_string())?;
            target.check_names().map(|()| target)
        };
        let good = "[[program]]\nname = \"server\"\ncommand = [\"x\"]\n";
        assert_eq!(parse(good).map(|target| target.hosts()), Ok(vec!["alice".into()]));
        for (text, part) in [
            ("program = []", "no [[program]]"),
            ("[[program]]\nname = \"a\"\ncommand = []\n", "has no command"),
            ("[[program]]\nname = \"a:b\"\ncommand = [\"x\"]\n", "a name has no ':'"),
            ("[[program]]\nname = \"a\"\ncommand = [\"x\"]\nhots = \"b\"\n", "hots"),
            ("[[program]]\nname = \"a\"\ncommand = [\"x\"]\nservice = true\n", "every program is a service"),
            (&format!("{good}{good}"), "two programs have the name"),
        ] {
            let error = parse(text).expect_err(text);
            assert!(error.contains(part), "{error}");
        }
    }
}
