//! Buckets in host names: `BUCKET.DOMAIN` for one of the gateway's domains, with any port. Any other host name is the
//! gateway's own, with buckets in paths: a name that someone has pointed here is not a bucket.

use s3s::S3Result;
use s3s::host::{S3Host, VirtualHost};

/// The domains of the gateway, in lower case.
pub struct Hosts(pub Vec<String>);

impl S3Host for Hosts {
    fn parse_host_header<'a>(&'a self, host: &'a str) -> S3Result<VirtualHost<'a>> {
        let name = host.rsplit_once(':').map_or(host, |(name, _)| name);
        let bucket = self.0.iter().find_map(|domain| name.strip_suffix(domain.as_str())?.strip_suffix('.'));
        let host = VirtualHost::new(host);
        Ok(match bucket.filter(|bucket| !bucket.is_empty()) {
            Some(bucket) => host.with_bucket(bucket),
            None => host,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_below_own_domains_alone() {
        let hosts = Hosts(vec!["s3.test".into()]);
        let bucket = |host| hosts.parse_host_header(host).expect("a host").bucket().map(String::from);
        assert_eq!(bucket("b.s3.test"), Some("b".into()));
        assert_eq!(bucket("a.b.s3.test:9000"), Some("a.b".into()));
        for host in ["s3.test", "s3.test:9000", ".s3.test", "xs3.test", "b.example.org", "localhost:9000"] {
            assert_eq!(bucket(host), None, "{host}");
        }
    }
}
