//! Seeds of what a gateway gets from a provider of objects.

use super::Seeds;

const NAMES: [&str; 6] = ["|a|", "|dir/b|", "|dir//|", "|dir/c|/", "lamassu.bucket", "other/name"];

pub fn provider(seeds: &mut Seeds) {
    let mut add = |name, input: Vec<u8>| seeds.entry(name).or_default().push(input);
    let entry = |name: &str| {
        format!(
            "<Contents><Key>{name}</Key><LastModified>2026-01-02T03:04:05.000Z</LastModified>\
             <ETag>&quot;ab&quot;</ETag><Size>5</Size></Contents>"
        )
    };
    let document = |content: String| {
        let head = "<?xml version=\"1.0\" encoding=\"UTF-8\"?><ListBucketResult><Name>cloud</Name>";
        format!("{head}{content}</ListBucketResult>").into_bytes()
    };
    add("listing", document(NAMES.map(entry).concat()));
    add("listing", document("<CommonPrefixes><Prefix>|dir|/</Prefix></CommonPrefixes>".into()));
    add("listing", document("<NextContinuationToken>next</NextContinuationToken>".to_owned() + &entry("|a|")));
    add("listing", b"<Error><Code>SlowDown</Code></Error>".to_vec());
    let identities = [format!("h{}", "A".repeat(54)), format!("i{}", "A".repeat(22))];
    for identity in identities {
        let rest = "\"headers\":{\"content-type\":\"text/plain\"},\"tags\":{\"a\":\"b\"},\
                    \"checksums\":{\"SHA1\":\"x\"},\"parts\":[{\"count\":2,\"size\":5}]";
        for etag in ["", "\"e\":\"ab\",", "\"m\":5,"] {
            let content = format!("{{\"s\":10,\"f\":\"{identity}\",{etag}{rest}}}");
            add("properties", [&[1, 2, 0], content.as_bytes()].concat());
        }
    }
    add("properties", b"\0\0\0AAAA".to_vec());
    for object in 0..4 {
        add("object", vec![object]);
        for kind in 0..7 {
            let at = 4096_u64 * u64::from(kind % 3) + 100;
            add("object", [&[object, kind][..], &at.to_le_bytes(), &[1, 1, 0]].concat());
        }
    }
}
