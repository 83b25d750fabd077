# Sourced: what NCCL and its networks are told, in this one place, by every way to start. What is set already stays.
# ROSSBY_FABRIC: infiniband, efa, or empty: NCCL finds out for itself, and falls back to sockets without a word.
# NCCL_DEBUG: what NCCL says of itself, on request: it slows nothing, and is long.
setting() { # name value: unless the user has set it
    [[ -n "${!1:-}" ]] || export "$1=$2"
}
[[ -n "${NCCL_DEBUG:-}" ]] || unset NCCL_DEBUG # empty, NCCL would take it for an unknown level
if [[ "${NCCL_DEBUG:-}" == INFO ]]; then
    setting NCCL_DEBUG_SUBSYS INIT,NET,ENV # which network and which settings it took; all else is pages a collective
fi
case "${ROSSBY_FABRIC:-}" in
    '') ;;
    infiniband)
        setting NCCL_NET IB # without its driver in the container NCCL would go over TCP, at a tenth of the speed
        setting NCCL_IB_TIMEOUT 22 # 4.096 us x 2^22 = 17 s: a link that is trained anew does not end the run
        ;;
    efa)
        setting FI_PROVIDER efa # libfabric would else go over TCP where EFA is not there, and say nothing
        # Readers of data are forked and started while memory is registered: with huge pages fork finds no memory.
        setting FI_EFA_USE_HUGE_PAGE 0
        ;;
    *)
        echo "rossby: ROSSBY_FABRIC = '$ROSSBY_FABRIC': an environment variable; write infiniband or efa" >&2
        exit 2
        ;;
esac
