//! `softhca completions`: completion scripts for shells.

use crate::exit_code::CommandResult;
use clap::CommandFactory;
use clap_complete::Shell;
use std::io;
use std::process::ExitCode;

/// Arguments of `softhca completions`.
#[derive(clap::Args)]
#[command(
    after_help = "Bash: softhca completions bash > ~/.local/share/bash-completion/completions/softhca\n\
                        Zsh: softhca completions zsh > a file _softhca in a folder of fpath\n\
                        Fish: softhca completions fish > ~/.config/fish/completions/softhca.fish"
)]
pub struct Arguments {
    /// The shell
    #[arg(value_enum)]
    shell: Shell,
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> CommandResult {
    let mut script = Vec::new();
    clap_complete::generate(arguments.shell, &mut crate::Arguments::command(), "softhca", &mut script);
    io::copy(&mut &script[..], &mut io::stdout()).map_err(crate::exit_code::failure)?;
    Ok(ExitCode::SUCCESS)
}
