from studies.refreshing.study import main

main()
