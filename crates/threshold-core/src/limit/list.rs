//! The macro that makes the enums of all algorithms, and the dispatch over them, from one list.
//!
//! An entry is `Name in module keeps StateType;`. It is the only place besides the algorithm's own file where the
//! algorithm is named. Dispatch is a `match` without a wildcard arm, so it is static, and the compiler refuses an
//! algorithm that does not answer a question.

/// Declares `Algorithm`, `Kind` (a limit of any algorithm) and `State` (the stored state of any algorithm), and the
/// macros that dispatch over them: `each_limit!`, `each_algorithm!`, `each_state!` and `first_state!`.
///
/// It begins with `[$]`: the macros that this one declares have variables of their own.
macro_rules! algorithms {
    ([$d:tt] $($(#[$doc:meta])* $name:ident in $module:ident $(keeps $state:ident)?;)+) => {
        /// The name of an algorithm.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        pub enum Algorithm {
            $($(#[$doc])* $name,)+
        }

        impl Algorithm {
            /// Every algorithm, in the order of the specification.
            pub const ALL: [Self; Self::COUNT] = [$(Self::$name,)+];
            /// The names of all algorithms, in the same order.
            pub const NAMES: [&'static str; Self::COUNT] = [$(<$module::$name as LimitAlgorithm>::NAME,)+];
            const COUNT: usize = [$(stringify!($name),)+].len();
        }

        /// A limit of any algorithm.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        enum Kind {
            $($name($module::$name),)+
            /// Nothing ever fits.
            Never,
        }

        impl Kind {
            #[inline]
            const fn algorithm(&self) -> Option<Algorithm> {
                match self {
                    $(Self::$name(_) => Some(Algorithm::$name),)+
                    Self::Never => None,
                }
            }
        }

        $(
            impl From<$module::$name> for Limit {
                #[inline]
                fn from(limit: $module::$name) -> Self {
                    Self(Kind::$name(limit))
                }
            }

            impl InLimit for $module::$name {
                #[inline]
                fn of(limit: &Limit) -> Option<&Self> {
                    if let Kind::$name(limit) = &limit.0 { Some(limit) } else { None }
                }
            }
        )+

        /// The stored state of one key, by the type that an algorithm keeps.
        #[derive(Debug, Clone, Default, PartialEq, Eq)]
        pub(crate) enum State {
            /// Never charged.
            #[default]
            Empty,
            $($($state($module::$state),)?)+
        }

        impl State {
            /// No stored state is longer.
            pub(crate) const MAX_BYTES: usize = {
                let mut most = 1;
                $($(if <$module::$state as AlgorithmState>::MAX_BYTES > most {
                    most = <$module::$state as AlgorithmState>::MAX_BYTES;
                })?)+
                most
            };
        }

        $($(
            impl StateSlot for $module::$state {
                #[inline(always)]
                fn of(state: &State) -> Option<&Self> {
                    if let State::$state(state) = state { Some(state) } else { None }
                }

                #[inline(always)]
                fn of_mut(state: &mut State) -> Option<&mut Self> {
                    if let State::$state(state) = state { Some(state) } else { None }
                }

                #[inline(always)]
                fn into_state(self) -> State {
                    State::$state(self)
                }
            }
        )?)+

        /// `each_limit!(kind, limit => about the limit, never => about the limit that lets nothing through)`.
        macro_rules! each_limit {
            ($d kind:expr, $d limit:ident => $d then:expr, never => $d never:expr) => {
                match $d kind {
                    $($crate::limit::Kind::$name($d limit) => $d then,)+
                    $crate::limit::Kind::Never => $d never,
                }
            };
        }

        /// `each_algorithm!(algorithm, A => about the type A)`.
        macro_rules! each_algorithm {
            ($d algorithm:expr, $d own:ident => $d then:expr) => {
                match $d algorithm {
                    $($crate::limit::Algorithm::$name => {
                        type $d own = $crate::limit::$module::$name;
                        $d then
                    })+
                }
            };
        }

        /// `each_state!(state, own => about the state, empty => about none)`.
        macro_rules! each_state {
            ($d state:expr, $d own:ident => $d then:expr, empty => $d empty:expr) => {
                match $d state {
                    $($($crate::limit::State::$state($d own) => $d then,)?)+
                    $crate::limit::State::Empty => $d empty,
                }
            };
        }

        /// `first_state!(S => an `Option` from the type S)`: the first `Some` of all state types.
        macro_rules! first_state {
            ($d own:ident => $d then:expr) => {
                None$($(.or_else(|| {
                    type $d own = $crate::limit::$module::$state;
                    $d then
                }))?)+
            };
        }
    };
}

pub(super) use algorithms;
