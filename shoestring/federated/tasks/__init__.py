"""Federated tasks beside training: evaluate, tune, compare. Configurations are sent out, sums come back, records stay
on devices.

    task                      what devices receive: a configuration and attachments
    from_options              a task made from command-line options
    settings                  candidate settings, and grids of them
    device                    the device's side; everything that leaves a device comes from `device_report`
    aggregates, totals        what devices send: sums and histograms
    gather                    asks many devices and adds up their answers
    release                   which of the sums the developer may see
    registry                  which devices earlier results were about
    estimates, student        means, standard errors, intervals of a difference
    evaluate, tune, compare   the three tasks and their results; `perform` runs a task; tables and text print results

Paulik, Seigel, Mason et al. 2021, Federated Evaluation and Tuning for On-Device Personalization: System Design &
Applications, arXiv 2102.08503.
"""
