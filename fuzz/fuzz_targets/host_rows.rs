#![no_main]
libfuzzer_sys::fuzz_target!(|input: &[u8]| lamassu_fuzz::run("host_rows", input));
