//! Turns the protocol into Rust, without a compiler that would have to be installed.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (file, dir) = ("proto/lamassu.proto", "proto");
    println!("cargo::rerun-if-changed={file}");
    let described = protox::compile([file], [dir])?;
    // A key is in no log.
    tonic_prost_build::configure().skip_debug(["lamassu.v1.Key"]).compile_fds(described)?;
    Ok(())
}
