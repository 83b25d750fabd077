#!/usr/bin/env bash
# Whether all ranks of this host are alive: each touches a file in ROSSBY_HEARTBEAT once a second. Exit code 0: yes.
all=$(find "$ROSSBY_HEARTBEAT" -name 'rank-*' 2>/dev/null)
silent=$(find "$ROSSBY_HEARTBEAT" -name 'rank-*' ! -newermt '-60 seconds' 2>/dev/null)
[[ -n "$all" && -z "$silent" ]]
