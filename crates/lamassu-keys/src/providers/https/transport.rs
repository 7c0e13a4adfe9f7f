//! The transport of requests: TLS over TCP, no proxies. A write to a server that has closed the connection
//! ([`tls::turned_away`]) succeeds: the read that follows gets the reason, or the end.

use crate::providers::tls;
use ureq::config::Config;
use ureq::unversioned::resolver::DefaultResolver;
use ureq::unversioned::transport::{
    Buffers, ConnectionDetails, Connector, NextTimeout, RustlsConnector, TcpConnector, Transport,
};
use ureq::{Agent, Error};

pub(super) fn agent(config: Config) -> Agent {
    let connector = ().chain(TcpConnector::default()).chain(Hearing).chain(RustlsConnector::default());
    Agent::with_parts(config, connector, DefaultResolver::default())
}

#[derive(Debug)]
struct Hearing;

impl<In: Transport> Connector<In> for Hearing {
    type Out = Heard<In>;

    fn connect(&self, _: &ConnectionDetails<'_>, chained: Option<In>) -> Result<Option<Heard<In>>, Error> {
        Ok(chained.map(Heard))
    }
}

#[derive(Debug)]
struct Heard<T>(T);

impl<T: Transport> Transport for Heard<T> {
    fn buffers(&mut self) -> &mut dyn Buffers {
        self.0.buffers()
    }

    fn transmit_output(&mut self, amount: usize, timeout: NextTimeout) -> Result<(), Error> {
        match self.0.transmit_output(amount, timeout) {
            Err(Error::Io(e)) if tls::turned_away(&e) => Ok(()),
            other => other,
        }
    }

    fn await_input(&mut self, timeout: NextTimeout) -> Result<bool, Error> {
        self.0.await_input(timeout)
    }

    fn is_open(&mut self) -> bool {
        self.0.is_open()
    }
}
