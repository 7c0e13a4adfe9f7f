//! Connections whose peers are not known yet, by address, oldest first. When an address has too many, or all together,
//! the oldest one gives way: of that address, or of the one that has most; if several have as many, of the one that has
//! waited longest. So a stranger behind the address of somebody else keeps nobody out, and all strangers together take
//! few files.

use parking_lot::Mutex;
use std::cmp::Reverse;
use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::sync::Arc;
use tokio::sync::oneshot;

/// Connections that are under way.
#[derive(Clone)]
pub(crate) struct Crowd {
    of_address: usize,
    of_all: usize,
    under_way: Arc<Mutex<UnderWay>>,
}

#[derive(Default)]
struct UnderWay {
    begun: u64,
    of: HashMap<IpAddr, VecDeque<(u64, oneshot::Sender<()>)>>,
}

/// A connection that is under way.
pub(crate) struct Turn {
    of: Crowd,
    address: IpAddr,
    number: u64,
}

impl Crowd {
    /// At most so many of one address, and of all.
    pub fn of(of_address: usize, of_all: usize) -> Crowd {
        Crowd { of_address, of_all, under_way: Arc::default() }
    }

    /// One more. The receiver is notified when it has to give way.
    pub fn begin(&self, address: IpAddr) -> (Turn, oneshot::Receiver<()>) {
        let address = network_of(address);
        let (give_way, gives_way) = oneshot::channel();
        let under_way = &mut *self.under_way.lock();
        under_way.begun += 1;
        let its = under_way.of.entry(address).or_default();
        its.push_back((under_way.begun, give_way));
        let has_too_many = its.len() > self.of_address;
        let all: usize = under_way.of.values().map(VecDeque::len).sum();
        let from = match () {
            () if has_too_many => under_way.of.get_mut(&address),
            () if all > self.of_all => {
                let oldest = |its: &VecDeque<(u64, _)>| its.front().map(|(number, _)| Reverse(*number));
                under_way.of.values_mut().max_by_key(|its| (its.len(), oldest(its)))
            }
            () => None,
        };
        if let Some((_, oldest)) = from.and_then(VecDeque::pop_front) {
            let _ = oldest.send(());
        }
        (Turn { of: self.clone(), address, number: under_way.begun }, gives_way)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let under_way = &mut *self.of.under_way.lock();
        if let Some(its) = under_way.of.get_mut(&self.address) {
            its.retain(|(number, _)| *number != self.number);
            if its.is_empty() {
                under_way.of.remove(&self.address);
            }
        }
    }
}

/// The unit by which addresses are counted: an IPv6 /64, since one subscriber has 2⁶⁴ addresses.
fn network_of(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V6(address) if address.to_ipv4_mapped().is_none() => {
            let bits = address.to_bits() >> 64 << 64;
            std::net::Ipv6Addr::from_bits(bits).into()
        }
        address => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn the_oldest_one_of_an_address_gives_way() {
        let crowd = Crowd::of(2, 100);
        let (one, two) = (address("10.0.0.1"), address("10.0.0.2"));
        let (_first, mut first) = crowd.begin(one);
        let (second, mut second_over) = crowd.begin(one);
        let (_other, mut other) = crowd.begin(two);
        let (_third, mut third) = crowd.begin(one);
        assert!(first.try_recv().is_ok());
        drop(second);
        let (_fourth, mut fourth) = crowd.begin(one);
        for waiting in [&mut second_over, &mut other, &mut third, &mut fourth] {
            assert!(waiting.try_recv().is_err(), "given up");
        }
    }

    #[test]
    fn of_all_the_oldest_one_of_the_address_with_most_gives_way() {
        let crowd = Crowd::of(3, 4);
        let all = ["10.0.0.1", "10.0.0.2", "10.0.0.2", "10.0.0.3"].map(|text| crowd.begin(address(text)));
        let (_one_more, mut newest) = crowd.begin(address("10.0.0.4"));
        assert!(newest.try_recv().is_err());
        let gave_way: Vec<_> = all.into_iter().map(|(turn, mut over)| (turn, over.try_recv().is_ok())).collect();
        assert_eq!(gave_way.iter().map(|(_, gave_way)| *gave_way).collect::<Vec<_>>(), [false, true, false, false]);
    }

    /// Else one that has just come could be the one.
    #[test]
    fn of_addresses_that_have_as_many_the_one_that_has_waited_longest_gives_way() {
        let crowd = Crowd::of(3, 10);
        let all = (0..30u8).map(|last| crowd.begin(IpAddr::from([10, 0, 0, last])));
        let mut all: Vec<_> = all.collect();
        let gave_way: Vec<_> = all.iter_mut().map(|(_, over)| over.try_recv().is_ok()).collect();
        assert!(gave_way.iter().enumerate().all(|(at, gave_way)| *gave_way == (at < 20)), "{gave_way:?}");
    }

    #[test]
    fn one_network_of_ipv6_is_one_address() {
        let network = |text: &str| network_of(address(text));
        assert_eq!(network("2001:db8::1"), network("2001:db8::ffff:1"));
        assert_ne!(network("2001:db8::1"), network("2001:db8:0:1::1"));
        assert_ne!(network("::ffff:10.0.0.1"), network("::ffff:10.0.0.2"));
    }
}
