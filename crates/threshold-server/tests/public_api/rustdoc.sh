#!/bin/sh
# rustdoc with its unstable options. Cargo runs this as RUSTDOC, so that RUSTC_BOOTSTRAP is set for rustdoc alone: set for
# all of cargo, it would rebuild every dependency whose build script looks at it.
RUSTC_BOOTSTRAP=1 exec rustdoc "$@"
