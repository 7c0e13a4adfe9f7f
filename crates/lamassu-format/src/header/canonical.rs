//! Canonical JSON (§4), the form under the MAC.

use serde_json::Value;

/// `value` with members sorted by name at every level, no white space, and only `"`, `\` and control characters
/// escaped.
///
/// Members are sorted here, not by the map type of `serde_json`, which a feature that another crate enables can change.
pub fn canonical(value: &Value) -> Vec<u8> {
    let mut out = Vec::with_capacity(1024);
    write(value, &mut out);
    out
}

fn write(value: &Value, out: &mut Vec<u8>) {
    match value {
        Value::Object(map) => {
            let mut members: Vec<_> = map.iter().collect();
            members.sort_by_key(|(name, _)| name.as_str());
            out.push(b'{');
            for (i, (name, member)) in members.into_iter().enumerate() {
                if i > 0 {
                    out.push(b',');
                }
                scalar(&Value::from(name.as_str()), out);
                out.push(b':');
                write(member, out);
            }
            out.push(b'}');
        }
        Value::Array(items) => {
            out.push(b'[');
            for (i, item) in items.iter().enumerate() {
                if i > 0 {
                    out.push(b',');
                }
                write(item, out);
            }
            out.push(b']');
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => scalar(value, out),
    }
}

fn scalar(value: &Value, out: &mut Vec<u8>) {
    out.extend_from_slice(value.to_string().as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The expected text is printed by Python's `json.dumps(…, sort_keys=True, separators=(",", ":"),
    /// ensure_ascii=False)`.
    #[test]
    fn as_python_prints_it() {
        let value: Value = serde_json::from_str(
            r#" { "b" : [ 1 , {"z": 0, "a": "\u00e9\"\\ / \u007f"} ], "a": 18446744073709551615, "B": [], "c": {} } "#,
        )
        .unwrap();
        let expected =
            "{\"B\":[],\"a\":18446744073709551615,\"b\":[1,{\"a\":\"é\\\"\\\\ / \u{7f}\",\"z\":0}],\"c\":{}}";
        assert_eq!(String::from_utf8(canonical(&value)).unwrap(), expected);
    }
}
