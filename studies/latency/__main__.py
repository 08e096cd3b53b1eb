from studies.latency.study import main

main()
