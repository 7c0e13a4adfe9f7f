//! Tells the linker that the plugin stays loaded.

fn main() {
    // nbdkit unloads plugins before it ends. Code of the plugin may still run then, in threads that libraries have
    // started.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo:rerun-if-changed=build.rs");
}
