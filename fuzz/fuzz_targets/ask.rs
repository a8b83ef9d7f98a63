//! Questions of clients that need no session: arbitrary JSON. A question that is understood is within its
//! limits, and means the same when it is encoded again.
#![cfg_attr(not(standalone), no_main)]

use host_bridge::ask::{MAX_GPUS, MAX_NAME, Question};

rgpu_fuzz::target!(|bytes: &[u8]| {
    let Ok(question) = Question::parse(bytes) else { return };
    if let Question::Lease(wish) = &question {
        assert!((1..=MAX_GPUS).contains(&(wish.gpus as usize)) && wish.devices.len() <= MAX_GPUS);
        assert!(wish.name.len() <= MAX_NAME && wish.model.len() <= MAX_NAME && wish.seconds > 0);
    }
    assert_eq!(Question::parse(&question.to_bytes()).unwrap(), question);
});
