//! Prints the JSON Schema of scenario files: `cargo run -p softhca-scenarios --example schema > scenarios/schema.json`.

fn main() {
    print!("{}", softhca_scenarios::schema());
}
