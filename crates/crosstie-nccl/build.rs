//! Linker flags of the plugin.

fn main() {
    // NCCL closes the library when its last communicator is destroyed, and may open it again. The library's threads and its
    // state must survive this, so it is never unloaded.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo::rerun-if-changed=build.rs");
}
