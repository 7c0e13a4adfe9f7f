//! How the JSON of a header is read and written. `serde` would also accept arrays in place of objects, and `null` for
//! an optional member: here neither is accepted.

use super::{HEADER_MAX, HeaderError};
use serde::de::value::MapAccessDeserializer;
use serde::de::{DeserializeOwned, Deserializer, MapAccess, Visitor};
use serde::{Deserialize, Serialize};
use std::marker::PhantomData;

/// The feature of a header whose keychain has an oblivious epoch.
pub const OBLIVIOUS: &str = "oblivious";

/// A `T` that is written as an object, not as an array.
#[derive(Serialize)]
#[serde(transparent)]
pub struct Object<T>(pub T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct Map<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for Map<T> {
            type Value = T;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<T, A::Error> {
                T::deserialize(MapAccessDeserializer::new(map))
            }
        }
        d.deserialize_map(Map(PhantomData)).map(Object)
    }
}

/// An optional member that is not `null` if present.
pub fn present<'de, T: Deserialize<'de>, D: Deserializer<'de>>(d: D) -> Result<Option<T>, D::Error> {
    T::deserialize(d).map(Some)
}

/// The members that say whether this program can read the rest. Others are ignored here.
#[derive(Deserialize)]
struct Probe {
    format: String,
    version: u64,
    features: Vec<String>,
}

/// Parses the JSON of a `T`. Format, version and features come first, so that the file of a later version is reported
/// as that, and not as one with unknown members.
pub fn from_slice<T: DeserializeOwned>(format: &'static str, bytes: &[u8]) -> Result<T, HeaderError> {
    let json = |e: serde_json::Error| HeaderError::Json(e.into());
    if bytes.len() > HEADER_MAX {
        return Err(HeaderError::TooLarge { max: HEADER_MAX });
    }
    let Object(probe) = serde_json::from_slice::<Object<Probe>>(bytes).map_err(json)?;
    if probe.format != format {
        let found = probe.format.chars().take(64).collect();
        return Err(HeaderError::WrongFormat { expected: format, found });
    }
    if probe.version != u64::from(crate::VERSION) {
        return Err(HeaderError::Version { found: probe.version });
    }
    let is_known = |name: &&String| ***name == *OBLIVIOUS;
    if let Some(name) = probe.features.iter().find(|name| !is_known(name)) {
        return Err(HeaderError::Feature { name: name.chars().take(64).collect() });
    }
    if probe.features.len() > 1 {
        return Err(HeaderError::Member { member: "features", rule: "an array of different features" });
    }
    Ok(serde_json::from_slice::<Object<T>>(bytes).map_err(json)?.0)
}

/// Indented JSON with a line end.
pub fn to_vec<T: Serialize>(wire: &T) -> Vec<u8> {
    let mut out = serde_json::to_vec_pretty(wire).expect("structs of strings and integers always serialise");
    out.push(b'\n');
    out
}

/// C of §4.
pub fn mac_input<T: Serialize>(wire: &T) -> Vec<u8> {
    let mut value = serde_json::to_value(wire).expect("structs of strings and integers always serialise");
    if let Some(object) = value.as_object_mut() {
        object.remove("mac");
    }
    super::canonical(&value)
}

/// S of §4.
pub fn signature_input<T: Serialize>(wire: &T) -> Vec<u8> {
    let mut value = serde_json::to_value(wire).expect("structs of strings and integers always serialise");
    if let Some(object) = value.as_object_mut() {
        object.remove("mac");
        if let Some(admin) = object.get_mut("admin").and_then(|a| a.as_object_mut()) {
            admin.remove("signature");
        }
    }
    super::canonical(&value)
}
