from studies.lengths.study import main

main()
