//! Lists devices, as `ibv_devices` does: `cargo run --example devices`.

use softhca::{Device, Error};

fn main() -> Result<(), Error> {
    // A process sees its host's device only: an embedded card is made when it is asked for.
    let devices = [Device::embedded()?];
    println!("    {:<16}\t   node GUID", "device");
    println!("    {:<16}\t----------------", "------");
    for device in &devices {
        println!("    {:<16}\t{:016x}", device.name(), device.guid());
    }
    Ok(())
}
