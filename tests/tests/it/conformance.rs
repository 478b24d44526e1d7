//! One suite of what the verbs promise, run on the store in this process, through the socket of
//! a daemon, and through commands without a daemon.
